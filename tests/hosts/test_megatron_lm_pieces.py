"""Megatron-LM's adapter in one process, with a model of one number; and its broadcast."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron_lm_loop import (
    GPT,
    NAME,
    Host,
    call_model,
    get_batch,
)

from megatron_lossagg import LossAggError, LossAggregator, ParallelGroups
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import build_model_chunks
from megatron_lossagg_plugin.megatron_lm import (
    broadcast_batch,
    make_forward_step,
    make_loss_func,
)

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
    assert list(report) == [NAME] and report[NAME].tolist() == pytest.approx([1.0, 1.0])
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
    host = Host(layout, per_token=False)
    forward_step = make_forward_step(
        host.aggregator, get_batch, call_model=call_model, num_microbatches=1
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
    build_model_chunks(GPT, layout)
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
