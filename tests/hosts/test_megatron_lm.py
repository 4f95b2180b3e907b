"""Megatron-LM's adapter, under the real schedules, DDP and rerun machinery."""

from __future__ import annotations

from copy import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron_lm_loop import (
    NAME,
    Host,
    call_model,
    cross_entropy,
    get_batch,
    is_middle_stage,
    reference,
)

from megatron_lossagg import LossAggError
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg_plugin.megatron_lm import (
    make_forward_step,
)


def _train_evaluate_train(layout, per_token, eval_num_microbatches):
    host = Host(layout, per_token)
    forward_step = make_forward_step(
        host.aggregator,
        get_batch,
        call_model=call_model,
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
        loss, gradient = reference(rank_pool, seed)
        for losses, _ in [result[step] for result in reporting]:
            assert losses == {NAME: pytest.approx(loss, rel=1e-12)}
        error = relative_error(results[0][step][1], gradient)
        assert error < (1e-6 if per_token else 1e-12)
    mean = sum(reference(rank_pool, seed)[0] for seed in (2, 3)) / 2
    for _, evaluated, _ in reporting:
        assert evaluated == {NAME: pytest.approx(mean, rel=1e-5)}


def _train_under_the_rerun_machine(layout, per_token):
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    host = Host(layout, per_token, is_rerun=True)
    checked = []

    def check_loss(loss):
        checked.append(loss.item())
        get_rerun_state_machine().validate_result(loss, torch.isnan, "found NaN in the loss")

    forward_step = make_forward_step(
        host.aggregator,
        get_batch,
        call_model=call_model,
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
        loss, gradient = reference(rank_pool, seed)
        assert results[0][0][step][0] == {NAME: pytest.approx(loss, rel=1e-12)}
        assert relative_error(results[0][0][step][1], gradient) < (1e-6 if per_token else 1e-12)
    for _, checked in results:
        assert checked[0:2] == checked[2:4] and checked[4:6] == checked[6:8] and len(checked) == 8


def _another_config(config):
    """As core_transformer_config_from_args(args) gives a script: not the model's own object."""
    other = copy(config)
    other.finalize_model_grads_func = None
    return other


def _train_with_another_number(layout, per_token, planned, is_copy):
    host = Host(layout, per_token, config_of=_another_config if is_copy else None)
    forward_step = make_forward_step(
        host.aggregator, get_batch, call_model=call_model, num_microbatches=planned
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
    host = Host(layout, per_token=False)
    forward_step = make_forward_step(
        host.aggregator, get_batch, call_model=call_model, num_microbatches=2
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
    host = Host(layout, per_token=False)
    forward_step = make_forward_step(
        host.aggregator, get_batch, call_model=call_model, num_microbatches=2
    )
    return host.evaluate(forward_step, host.iterators(2), 1, 2, sft=True)


def test_evaluation_under_sft_reports_the_objective(rank_pool):
    """`evaluate` then averages the quotients of microbatches, and clamps denominators to 1."""
    loss, _ = reference(rank_pool, 2)
    for evaluated in rank_pool.run(_evaluate_as_sft, Layout.parse("D=2 M=2"), world_size=2):
        assert evaluated == {NAME: pytest.approx(loss, rel=1e-6)}


def _host_get_batch(data_iterator, vp_stage=None):
    """`get_batch` of `pretrain_gpt.py` as of 0.15, and the two slicers it calls."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if is_middle_stage(vp_stage):
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
    host = Host(
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
    loss, gradient = reference(rank_pool, 0, gpt, cross_entropy)
    results = rank_pool.run(_train_like_pretrain_gpt, gpt, world_size=4)
    assert results[-1][0] == {NAME: pytest.approx(loss, rel=1e-5)}
    assert relative_error(results[0][1], gradient) < 1e-5
