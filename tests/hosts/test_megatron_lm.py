"""Megatron-LM's adapter, under the real schedules, DDP and rerun machinery.

Megatron-LM itself is not installed: `_Host` holds what its `train_step` and `evaluate` do with a
forward step and with what it reports, and `_host_get_batch` what its `get_batch` does.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import LossAggError, LossAggregator, ParallelGroups, slice_for_cp
from megatron_lossagg.testing.global_batch import ragged_batch
from megatron_lossagg.testing.gradients import relative_error, whole_model_gradient
from megatron_lossagg.testing.layout import Layout
from megatron_lossagg.testing.model_chunks import build_model_chunks, token_log_probs
from megatron_lossagg.testing.parameter_names import unwrap
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg.testing.tiny_gpt import TinyGPT
from megatron_lossagg_plugin.megatron_lm import (
    broadcast_batch,
    make_forward_step,
    make_loss_func,
)

_GPT = TinyGPT()
_MODE = "seq-mean-token-mean"
_FIELDS = ("tokens", "labels", "position_ids", "loss_mask", "advantages")
_NAME = "lm loss"


def _token_losses(logits, batch):
    return -batch["advantages"] * token_log_probs(logits, batch["labels"])


def _cross_entropy(logits, batch):
    return -token_log_probs(logits, batch["labels"])


def _batch(seed, layout):
    batch = ragged_batch(16, dp=2, num_microbatches=2, extra_fields=("advantages",), seed=seed)
    return batch.split(layout.dp, layout.num_microbatches)


@cache
def _on_this_rank(gpt, seed, token_losses):
    return reference_run(gpt, _batch(seed, Layout()), token_losses, _MODE)


@cache
def _reference(pool, seed, gpt=_GPT, token_losses=_token_losses):
    """(J, gradient) of a batch in one process."""
    [result] = pool.run(_on_this_rank, gpt, seed, token_losses, world_size=1)
    return result


def _num_tokens(seed):
    return int(_batch(seed, Layout()).rows["loss_mask"].sum())


# What a training script does around a forward step.


class _Host:
    """Megatron-LM's `train_step` and `evaluate`, without arguments, timers and the optimizer."""

    def __init__(self, layout, per_token, gpt=_GPT, is_rerun=False, **aggregator_arguments):
        from megatron.core import rerun_state_machine as rerun

        modes = rerun.RerunMode
        mode = modes.REPORT_DETERMINISM_STATS if is_rerun else modes.DISABLED
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(mode=mode)
        # In 0.16.1 its log of statistics fails on an attribute that does not exist.
        rerun.get_rerun_state_machine()._maybe_report_stats = lambda: None
        self.layout = layout
        self.chunks = build_model_chunks(gpt, layout, calculate_per_token_loss=per_token)
        self.num_optimizer_steps = 0
        arguments = {
            "loss_fn": _token_losses,
            "loss_agg_mode": _MODE,
            "model_config": unwrap(self.chunks[0]).config,
            "weights_key": "loss_mask",
            "weight_dtype": torch.float64,
            **aggregator_arguments,
        }
        self.aggregator = LossAggregator(arguments.pop("loss_fn"), **arguments)

    def iterators(self, *seeds, num_microbatches=None):
        """One per chunk, over several steps; None where Megatron-LM loads no data."""
        from megatron.core import parallel_state
        from megatron.core.rerun_state_machine import RerunDataIterator

        num_microbatches = num_microbatches or self.layout.num_microbatches
        dp_rank = parallel_state.get_data_parallel_rank()
        batches = [
            _batch(s, Layout(self.layout.dp, num_microbatches=num_microbatches)) for s in seeds
        ]
        microbatches = [m for batch in batches for m in batch.microbatches(dp_rank)]
        iterators = []
        for chunk in self.chunks:
            model = unwrap(chunk)
            has_data = model.pre_process or model.post_process
            has_data = has_data and parallel_state.get_tensor_model_parallel_rank() == 0
            iterators.append(RerunDataIterator(iter(microbatches)) if has_data else None)
        return iterators if len(iterators) > 1 else iterators[0]

    def schedule(self, forward_step, data_iterator, num_microbatches, forward_only):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows_of_rank = 16 // self.layout.dp
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=16,
            micro_batch_size=rows_of_rank // num_microbatches,
            forward_only=forward_only,
        )

    def train_step(self, forward_step, data_iterator, num_microbatches=None):
        """(reported losses or {}, gradient of the whole model)."""
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        num_microbatches = num_microbatches or self.layout.num_microbatches
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            losses = self.schedule(forward_step, data_iterator, num_microbatches, False)
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
        self.num_optimizer_steps += 1
        return self._reduced(losses), whole_model_gradient(self.chunks)

    def _reduced(self, losses):
        reduced = {}
        for key in losses[0] if losses else ():
            value = torch.vstack([x[key].view(-1) for x in losses]).sum(dim=0)
            dist.all_reduce(value, group=_dp_cp_group())
            reduced[key] = (value[0] / value[1]).item()
        return reduced

    def evaluate(self, forward_step, data_iterator, eval_iters, num_microbatches, sft=False):
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

        for chunk in self.chunks:
            chunk.eval()
        machine = get_rerun_state_machine()
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)
        totals = {}
        with torch.no_grad():
            for _ in range(eval_iters):
                losses = self.schedule(forward_step, data_iterator, num_microbatches, True)
                for key in losses[0] if losses else ():
                    total = totals.setdefault(key, torch.zeros(2, device="cuda"))
                    value = torch.vstack([x[key].view(-1) for x in losses])
                    if sft:
                        value = (value[:, 0] / value[:, 1].clamp(min=1)).mean()
                        dist.all_reduce(value, group=_dp_cp_group())
                        total += torch.stack(
                            [value / _dp_cp_group().size(), torch.ones_like(value)]
                        )
                    else:
                        value = value.sum(dim=0)
                        dist.all_reduce(value, group=_dp_cp_group())
                        total += value
        for chunk in self.chunks:
            chunk.train()
        machine.set_mode(mode)
        return {key: (total[0] / total[1]).item() for key, total in totals.items()}


def _dp_cp_group():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _is_middle_stage(vp_stage):
    from megatron.core import parallel_state

    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    return not (
        parallel_state.is_pipeline_first_stage(**stage)
        or parallel_state.is_pipeline_last_stage(**stage)
    )


def _get_batch(data_iterator, vp_stage=None):
    """Of an RL script: tensor-parallel rank 0 reads, fields of its own travel along."""
    if _is_middle_stage(vp_stage):
        return None
    batch = None if data_iterator is None else next(data_iterator)
    return slice_for_cp(broadcast_batch(batch, _FIELDS))


def _call_model(model, batch):
    return model(batch.get("tokens"), batch.get("position_ids"), None)


def _train_evaluate_train(layout, per_token, eval_num_microbatches):
    host = _Host(layout, per_token)
    forward_step = make_forward_step(
        host.aggregator,
        _get_batch,
        call_model=_call_model,
        num_microbatches=lambda: layout.num_microbatches,
        eval_num_microbatches=eval_num_microbatches,
    )
    training = host.iterators(0, 1)
    evaluation = host.iterators(2, 3, num_microbatches=eval_num_microbatches)
    first = host.train_step(forward_step, training)
    evaluated = host.evaluate(forward_step, evaluation, 2, eval_num_microbatches)
    second = host.train_step(forward_step, training)
    return first, evaluated, second


@pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
@pytest.mark.parametrize(
    "text", ["D=2 M=2", "TP=2 M=2", "C=2 M=2", "TP=2 PP=2 M=2", "PP=2 VPP=2 M=2", "PP=4 M=2"]
)
def test_training_and_evaluation_are_those_of_one_process(rank_pool, text, per_token):
    """Gradients and reported J of two steps, around an evaluation with another M."""
    layout = Layout.parse(text)
    results = rank_pool.run(
        _train_evaluate_train, layout, per_token, 4, world_size=layout.world_size
    )
    reporting = [result for result in results if result[0][0]]
    assert len(reporting) == layout.world_size // layout.pp
    for step, seed in ((0, 0), (2, 1)):
        loss, gradient = _reference(rank_pool, seed)
        for losses, _ in [result[step] for result in reporting]:
            assert losses == {_NAME: pytest.approx(loss, rel=1e-12)}
        error = relative_error(results[0][step][1], gradient)
        assert error < (1e-6 if per_token else 1e-12)
    mean = sum(_reference(rank_pool, seed)[0] for seed in (2, 3)) / 2
    for _, evaluated, _ in reporting:
        assert evaluated == {_NAME: pytest.approx(mean, rel=1e-5)}


def _train_under_the_rerun_machine(layout, per_token):
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    host = _Host(layout, per_token, is_rerun=True)
    checked = []

    def check_loss(loss):
        checked.append(loss.item())
        get_rerun_state_machine().validate_result(loss, torch.isnan, "found NaN in the loss")

    forward_step = make_forward_step(
        host.aggregator,
        _get_batch,
        call_model=_call_model,
        num_microbatches=layout.num_microbatches,
        check_loss=check_loss,
    )
    training = host.iterators(0, 1)
    steps = [host.train_step(forward_step, training) for _ in range(2)]
    return steps, checked


@pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
def test_a_replayed_step_is_the_same_step(rank_pool, per_token):
    """Megatron's machine rewinds the data and runs every step twice; the next step is the next."""
    layout = Layout.parse("D=2 M=2")
    results = rank_pool.run(
        _train_under_the_rerun_machine, layout, per_token, world_size=layout.world_size
    )
    for step, seed in ((0, 0), (1, 1)):
        loss, gradient = _reference(rank_pool, seed)
        assert results[0][0][step][0] == {_NAME: pytest.approx(loss, rel=1e-12)}
        assert relative_error(results[0][0][step][1], gradient) < (1e-6 if per_token else 1e-12)
    for _, checked in results:
        assert checked[0:2] == checked[2:4] and checked[4:6] == checked[6:8] and len(checked) == 8


def _train_with_another_number(layout, per_token, planned, is_copy):
    from copy import copy

    host = _Host(layout, per_token)
    if is_copy:
        # As core_transformer_config_from_args(args) gives a script: not the model's own object.
        config = copy(host.aggregator.model_config)
        config.finalize_model_grads_func = None
        object.__setattr__(host.aggregator._settings, "model_config", config)
    forward_step = make_forward_step(
        host.aggregator, _get_batch, call_model=_call_model, num_microbatches=planned
    )
    try:
        host.train_step(forward_step, host.iterators(0))
    except LossAggError as error:
        return host.num_optimizer_steps, str(error)
    return host.num_optimizer_steps, ""


@pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
@pytest.mark.parametrize("planned", [1, 2, 8])
def test_a_schedule_that_runs_another_number_raises_before_the_optimizer(
    rank_pool, planned, per_token
):
    """Whatever the two numbers: a divisor of the schedule's plans several steps in one run."""
    layout = Layout.parse("D=2 M=4")
    run = partial(rank_pool.run, _train_with_another_number, layout, per_token, planned)
    results = run(planned == 2, world_size=2)
    # A rank whose own losses are all 0 learns it from the other.
    assert all(num_steps == 0 and message for num_steps, message in results)
    assert any("num_microbatches" in message for _, message in results)


def _train_after_an_evaluation_with_another_number(layout):
    host = _Host(layout, per_token=False)
    forward_step = make_forward_step(
        host.aggregator, _get_batch, call_model=_call_model, num_microbatches=2
    )
    host.evaluate(forward_step, host.iterators(2, num_microbatches=4), 1, 4)
    try:
        host.train_step(forward_step, host.iterators(0))
    except LossAggError as error:
        return str(error)
    return ""


def test_an_evaluation_that_runs_another_number_raises_at_the_next_training_step(rank_pool):
    for message in rank_pool.run(
        _train_after_an_evaluation_with_another_number, Layout.parse("TP=2 M=2"), world_size=2
    ):
        assert "num_microbatches" in message


def _evaluate_as_sft(layout):
    host = _Host(layout, per_token=False)
    forward_step = make_forward_step(
        host.aggregator, _get_batch, call_model=_call_model, num_microbatches=2
    )
    return host.evaluate(forward_step, host.iterators(2), 1, 2, sft=True)


def test_evaluation_under_sft_reports_the_objective(rank_pool):
    """`evaluate` then averages the quotients of microbatches, and clamps denominators to 1."""
    loss, _ = _reference(rank_pool, 2)
    for evaluated in rank_pool.run(_evaluate_as_sft, Layout.parse("D=2 M=2"), world_size=2):
        assert evaluated == {_NAME: pytest.approx(loss, rel=1e-6)}


def _host_get_batch(data_iterator, vp_stage=None):
    """`get_batch` of `pretrain_gpt.py` as of 0.15, and the two slicers it calls."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if _is_middle_stage(vp_stage):
        return None, None, None, None, None
    data = None if data_iterator is None else next(data_iterator)
    source = parallel_state.get_tensor_model_parallel_src_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    shape = (8, 16) if data is None else data["tokens"].shape
    dtypes = {"tokens": torch.int64, "labels": torch.int64}
    dtypes |= {"loss_mask": torch.float32, "attention_mask": None, "position_ids": torch.int64}
    is_first = parallel_state.is_pipeline_first_stage()
    is_last = parallel_state.is_pipeline_last_stage()
    batch = {}
    for key, dtype in dtypes.items():
        wanted = is_first if key in ("tokens", "position_ids") else is_last
        batch[key] = None
        if dtype is not None and wanted:
            batch[key] = torch.empty(shape, dtype=dtype) if data is None else data[key].cuda()
            dist.broadcast(batch[key], source, group=group)
    return get_batch_on_this_cp_rank(batch).values()


def _train_like_pretrain_gpt(gpt):
    host = _Host(
        Layout(tp=2, pp=2, num_microbatches=2),
        per_token=False,
        gpt=gpt,
        loss_fn=lambda output, batch: output,
        weight_dtype=torch.float32,
    )
    forward_step = make_forward_step(host.aggregator, _host_get_batch, num_microbatches=2)
    return host.train_step(forward_step, host.iterators(0))


def test_the_default_call_with_the_batch_of_pretrain_gpt(rank_pool):
    """In float32, with Megatron's own cross entropy and a broadcast of its fixed fields."""
    gpt = TinyGPT(dtype=torch.float32)
    loss, gradient = _reference(rank_pool, 0, gpt, _cross_entropy)
    results = rank_pool.run(_train_like_pretrain_gpt, gpt, world_size=4)
    assert results[-1][0] == {_NAME: pytest.approx(loss, rel=1e-5)}
    assert relative_error(results[0][1], gradient) < 1e-5


# Without communication: one process, a model of one number.


class _Model(torch.nn.Module):
    """A loss chunk that records how it was called; every token's loss is `weight`."""

    def __init__(self, **config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.config = SimpleNamespace(**{"calculate_per_token_loss": False, **config})
        self.post_process = True
        self.vp_stage = None
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.weight.expand(args[0].shape)

    def build_schedule_plan(self, *args, **kwargs):
        return "plan", args, kwargs


def _aggregator(model, **arguments):
    return LossAggregator(
        lambda output, batch: output,
        loss_agg_mode="token-mean",
        model_config=model.config,
        groups=ParallelGroups.single_process(),
        **{"weights_key": "loss_mask", **arguments},
    )


def _microbatch():
    mask = torch.tensor([[0.0, 1, 1], [0, 0, 1]])
    tokens = torch.full((2, 3), 7)
    return {"tokens": tokens, "labels": tokens + 1, "position_ids": tokens + 2, "loss_mask": mask}


def _get_dict(data_iterator, vp_stage=None):
    return next(data_iterator)


def _values_to_0_14(data_iterator):
    batch = next(data_iterator) | {"attention_mask": None}
    keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    return {key: batch[key] for key in keys}.values()


def _values_of_0_15(data_iterator, vp_stage=None):
    return tuple(_values_to_0_14(data_iterator))


def _values_of_0_16(data_iterator, vp_stage: int | None = None):
    return (*_values_to_0_14(data_iterator), None)


def _values_since_0_18(data_iterator, vp_stage: int | None = None):
    keys = ["attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels"]
    keys += ["local_cp_size", "loss_mask", "max_seqlen", "position_ids", "tokens"]
    batch = next(data_iterator)
    return [batch.get(key) for key in keys]


@pytest.mark.parametrize(
    "get_batch",
    [_get_dict, _values_to_0_14, _values_of_0_15, _values_of_0_16, _values_since_0_18],
)
def test_what_get_batch_of_each_release_returns(get_batch):
    """Fields reach the model in their places, and the loss its weights."""
    model = _Model()
    forward_step = make_forward_step(_aggregator(model), get_batch, num_microbatches=1)
    output, loss_func = forward_step(iter([_microbatch()]), model)
    loss, report = loss_func(output)
    loss.backward()
    assert loss.item() == pytest.approx(1.0) and model.weight.grad.item() == pytest.approx(1.0)
    assert list(report) == [_NAME] and report[_NAME].tolist() == pytest.approx([1.0, 1.0])
    [(args, options)] = model.calls
    assert [a if a is None else a[0, 0].item() for a in args] == [7, 9, None]
    assert list(options) == ["labels"] and options["labels"][0, 0] == 8


def test_another_tuple_needs_names():
    model = _Model()

    def get_batch(data_iterator, vp_stage=None):
        batch = next(data_iterator)
        return batch["loss_mask"], batch["tokens"]

    make = partial(make_forward_step, _aggregator(model), get_batch, num_microbatches=1)
    with pytest.raises(ValueError, match="returned 2 values, expected a dict or 5, 6, 10"):
        make()(iter([_microbatch()]), model)
    with pytest.raises(ValueError, match="returned 2 values, expected a dict or 3"):
        make(batch_keys=("loss_mask", "tokens", "labels"))(iter([_microbatch()]), model)
    output, loss_func = make(batch_keys=("loss_mask", "tokens"))(iter([_microbatch()]), model)
    assert loss_func(output)[0].item() == pytest.approx(1.0)


def test_a_schedule_plan_is_built_with_the_arguments_of_the_model():
    model = _Model()
    forward_step = make_forward_step(_aggregator(model), _get_dict, num_microbatches=2)
    data = iter([_microbatch(), _microbatch()])
    (_, args, options), loss_func = forward_step(data, model, return_schedule_plan=True)
    assert args[0][0, 0] == 7 and options["labels"][0, 0] == 8
    # The overlapped schedule takes the next microbatch before this one's loss.
    _, next_loss_func = forward_step(data, model, return_schedule_plan=True)
    losses = [f(torch.ones(2, 3))[0].item() for f in (loss_func, next_loss_func)]
    assert losses == pytest.approx([1.0, 1.0])


def test_multi_token_prediction_gets_the_mask_and_not_the_weights():
    model = _Model(mtp_num_layers=1, calculate_per_token_loss=True)
    forward_step = make_forward_step(
        _aggregator(model, weight_dtype=torch.float64), _get_dict, num_microbatches=1
    )
    forward_step(iter([_microbatch()]), model)
    assert torch.equal(model.calls[0][1]["loss_mask"], _microbatch()["loss_mask"])


def test_non_loss_data_gives_the_report():
    model = _Model()
    forward_step = make_forward_step(
        _aggregator(model), _get_dict, num_microbatches=1, name="policy loss"
    )
    output, loss_func = forward_step(iter([_microbatch()]), model)
    assert list(loss_func(output, non_loss_data=True)) == ["policy loss"]


def test_loss_func_takes_the_tensor_or_the_microbatch():
    """As `partial(loss_func, loss_mask, model=model)` of a script with its own forward step."""
    model = _Model()
    aggregator = _aggregator(model)
    loss_func = make_loss_func(aggregator)
    data = aggregator.wrap(iter([_microbatch()]), num_microbatches=1)
    batch = next(data)
    values = [
        f(torch.ones(2, 3))[0].item()
        for f in (partial(loss_func, batch["loss_mask"], model=model), partial(loss_func, batch))
    ]
    assert values == pytest.approx([1.0, 1.0])


def test_iterators_of_each_step_are_wrapped_anew():
    """A loop that makes an iterator per step, as RL loops do."""
    model = _Model()
    forward_step = make_forward_step(_aggregator(model), _get_dict, num_microbatches=1)
    for _ in range(3):
        output, loss_func = forward_step(iter([_microbatch()]), model)
        assert loss_func(output)[0].item() == pytest.approx(1.0)


def test_chunks_without_the_loss_read_what_they_are_given():
    """No counting there: their microbatches, masks included, are the caller's own."""
    model = _Model()
    chunk = _Model()
    chunk.config, chunk.post_process = model.config, False
    data, microbatch = iter([_microbatch()]), _microbatch()
    seen = []

    def get_batch(data_iterator, vp_stage=None):
        seen.append(data_iterator)
        return microbatch

    make_forward_step(_aggregator(model), get_batch, num_microbatches=1)(data, chunk)
    assert seen == [data]


def test_evaluation_runs_the_number_of_megatron_lms_arguments(monkeypatch):
    args = SimpleNamespace(
        global_batch_size=8,
        micro_batch_size=2,
        eval_global_batch_size=12,
        eval_micro_batch_size=2,
        data_parallel_size=2,
    )
    module = ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = args
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = _Model().eval()
    forward_step = make_forward_step(_aggregator(model), _get_dict, num_microbatches=2)
    data = iter([_microbatch()] * 4)
    forward_step(data, model)
    assert len(list(data)) == 1  # three were taken: 12 / (2 * 2)


def test_faults_of_the_setup_raise():
    model = _Model()
    with pytest.raises(ValueError, match="weights_key='loss_mask'"):
        make_forward_step(_aggregator(model, weights_key="loss_weights"), _get_dict)
    forward_step = make_forward_step(_aggregator(model), _get_dict, num_microbatches=1)
    with pytest.raises(ValueError, match="calculate_per_token_loss=True"):
        forward_step(iter([_microbatch()]), _Model(calculate_per_token_loss=True))
    for scope in ({"cuda_graph_impl": "full_iteration"}, {"cuda_graph_scope": ["full_iteration"]}):
        with pytest.raises(LossAggError, match="CUDA graph"):
            forward_step(iter([_microbatch()]), _Model(**scope))
    packed = {key: value[:1] for key, value in _microbatch().items()}
    packed["cu_seqlens"] = torch.tensor([0, 1, 3])
    with pytest.raises(LossAggError, match="call_model=.*cu_seqlens"):
        forward_step(iter([packed]), model)

    def cast_to_a_mask(data_iterator):
        return {k: v.bool() if k == "loss_mask" else v for k, v in next(data_iterator).items()}

    forward_step = make_forward_step(_aggregator(model), cast_to_a_mask, num_microbatches=1)
    output, loss_func = forward_step(iter([_microbatch()]), model)
    with pytest.raises(TypeError, match="loss_mask"):
        loss_func(output)


def _train_without_data():
    layout = Layout()
    host = _Host(layout, per_token=False)
    forward_step = make_forward_step(
        host.aggregator, _get_batch, call_model=_call_model, num_microbatches=1
    )
    try:
        host.train_step(forward_step, None)
    except LossAggError as error:
        return str(error)
    return ""


def test_the_rank_that_reads_must_have_data(rank_pool):
    [message] = rank_pool.run(_train_without_data, world_size=1)
    assert "tensor-parallel rank 0" in message


def _broadcast(batch, fields):
    from megatron.core import parallel_state

    layout = Layout(tp=dist.get_world_size())
    build_model_chunks(_GPT, layout)
    rank = parallel_state.get_tensor_model_parallel_rank()
    return broadcast_batch(batch if rank == 0 else None, fields)


@pytest.mark.parametrize("world_size", [1, 2])
def test_broadcast_keeps_every_dtype_and_shape(rank_pool, world_size):
    batch = {
        "bool": torch.tensor([[True], [False], [True]]),
        "weights": torch.tensor([1 / 3, torch.nan, 1e-300], dtype=torch.float64),
        "bfloat16": torch.randn(3, 5).bfloat16().t(),
        "scalar": torch.tensor(2**62),
        "empty": torch.zeros(0, 4, dtype=torch.int32),
        "four": torch.arange(48.0).view(1, 2, 4, 6),
        "unused": torch.zeros(2),
    }
    fields = ("bool", "weights", "absent", "bfloat16", "scalar", "empty", "four")
    for received in rank_pool.run(_broadcast, batch, fields, world_size=world_size):
        assert list(received) == list(fields)
        assert received.pop("absent") is None
        for field, tensor in received.items():
            assert tensor.dtype == batch[field].dtype
            torch.testing.assert_close(tensor, batch[field], rtol=0, atol=0, equal_nan=True)


def test_importing_the_adapter_imports_no_megatron():
    code = """
import sys
import megatron_lossagg_plugin
import megatron_lossagg_plugin.megatron_lm
print([name for name in sys.modules if name.split('.')[0] == 'megatron'])
"""
    environment_path = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {environment_path}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_a_missing_symbol_of_megatron_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.utils", ModuleType("megatron.core.utils"))
    model = _Model()
    forward_step = make_forward_step(_aggregator(model), _get_dict, num_microbatches=1)
    with pytest.raises(ImportError, match=r"megatron\.core\.utils\.get_attr_wrapped_model"):
        forward_step(iter([_microbatch()]), model)
