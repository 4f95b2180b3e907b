"""What Megatron's schedules do behind one's back, each on the real schedule (regimes R1 and R3)."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from prescribed import Prescribed, assert_step, batch_of, even, prescribed_losses, run

from megatron_lossagg import (
    GlobalCounts,
    LossAggError,
    LossAggregator,
    ParallelGroups,
    slice_for_cp,
)
from megatron_lossagg.step.step import Step
from megatron_lossagg.testing import RankFailure
from megatron_lossagg.testing.gradients import whole_model_gradient
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg.testing.model.scalar_model import build_scalar_chunks
from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
LOSSES = [[1, 2, 3, 4], [6, 9, 9, 9], [2, 2, 9, 9], [5, 7, 9, 9]]
MASK = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]
TOKEN_MEAN = 27 / 8


def rows(num_ranks: int, num_microbatches: int):
    return batch_of(LOSSES, MASK, even(4, num_ranks, num_microbatches))


@BOTH_REGIMES
@pytest.mark.parametrize("layout", ["D=2 M=2", "C=2 M=2", "PP=2 M=4", "PP=2 VPP=2 M=4"])
def test_forward_only_reports_the_same_value(rank_pool, layout, per_token):
    """Evaluation, and collect_non_loss_data (which calls loss_func with non_loss_data=True)."""
    parsed = Layout.parse(layout)
    batch = rows(parsed.dp, parsed.num_microbatches)
    options = {"per_token": per_token, "forward_only": True}
    assert_step(rank_pool, batch, layout, "token-mean", TOKEN_MEAN, **options)
    _, reports = run(rank_pool, batch, layout, "token-mean", collect_non_loss_data=True, **options)
    assert all(abs(r["loss"] - TOKEN_MEAN) < 1e-12 for r in reports)


class ToldAnotherNumber(Prescribed):
    """The schedule is called with another number of microbatches than the step was planned for."""

    told = 2

    def __call__(self, context):
        plan = super().__call__(context)
        return type(plan)(plan.forward_step_func, plan.data_iterator, self.told, plan.finish)


class ToldMore(ToldAnotherNumber):
    told = 5


@BOTH_REGIMES
@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize("layout", ["D=2 M=4", "PP=2 M=4"])
def test_fewer_microbatches_than_planned(rank_pool, layout, planning, per_token):
    """It raises before the optimizer could step, naming both numbers."""
    dp = Layout.parse(layout).dp
    batch = batch_of(LOSSES * dp, MASK * dp, even(4 * dp, dp, 4))
    plan = ToldAnotherNumber("token-mean", planning=planning)
    with pytest.raises(RankFailure, match="took 2 microbatches.*planned for 4"):
        run(rank_pool, batch, layout, "token-mean", plan=plan, per_token=per_token)


@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
def test_more_microbatches_than_planned(rank_pool, planning):
    """The iterator refuses the fifth of four."""
    plan = ToldMore("token-mean", planning=planning)
    message = "More than the 4 microbatches" if planning == "begin_step" else "StopIteration"
    with pytest.raises(RankFailure, match=message):
        run(rank_pool, rows(1, 4), "D=1 M=4", "token-mean", plan=plan)


@BOTH_REGIMES
def test_a_step_may_be_replayed(rank_pool, per_token):
    """Evaluate, then train twice on one plan: each pass gives the same value and gradient."""
    for values, gradients in rank_pool.run(_replays, per_token, world_size=2):
        assert values == pytest.approx([TOKEN_MEAN] * 3, abs=1e-12)
        assert gradients == pytest.approx([TOKEN_MEAN] * 2, abs=1e-6 if per_token else 1e-12)


def _replays(per_token):
    chunks, aggregator, microbatches = _pipeline_of_two(per_token)
    step = aggregator.begin_step(microbatches)
    values, gradients = [], []
    for forward_only in (True, False, False):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        store = _run_schedule(chunks, step, forward_only=forward_only)
        step.validate()
        values.append(step.report(store)["loss"])
        if not forward_only:
            gradients.append(next(iter(whole_model_gradient(chunks).values())).item())
    return values, gradients


def _pipeline_of_two(per_token, **options):
    chunks = build_scalar_chunks(
        Layout(pp=2, num_microbatches=4), calculate_per_token_loss=per_token
    )
    aggregator = LossAggregator(
        prescribed_losses,
        loss_agg_mode="token-mean",
        model_config=unwrap(chunks[0]).config,
        weight_dtype=torch.float64,
        **options,
    )
    return chunks, aggregator, rows(1, 4).microbatches(0)


def _run_schedule(chunks, step, *, forward_only=False):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator, model):
        microbatch = slice_for_cp(next(data_iterator))
        return model(microbatch["loss_mask"]), partial(step.loss_func, microbatch)

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=step.data_iterator(len(chunks)),
            model=chunks,
            num_microbatches=step.num_microbatches,
            seq_length=4,
            micro_batch_size=1,
            forward_only=forward_only,
        )


def test_num_tokens_beyond_int32_is_refused_under_R3(rank_pool):
    """Megatron sums num_tokens in int32; the counts themselves are int64."""
    for message in rank_pool.run(_beyond_int32, True, world_size=2):
        assert "2147483648 valid tokens" in message and "int32" in message
    assert rank_pool.run(_beyond_int32, False, world_size=2) == ["", ""]


def _beyond_int32(per_token):
    chunks, aggregator, microbatches = _pipeline_of_two(per_token)
    # A batch of 2^31 tokens of which this test holds 8: the counts are a driver's.
    step = aggregator.begin_step(microbatches, counts=GlobalCounts(2**31, 4, 4))
    _run_schedule(chunks, step)
    try:
        step.validate()
    except LossAggError as error:
        # The weights of 8 tokens of 2^31 cannot sum to the checksum; that is not the point here.
        return "" if "checksum" in str(error) else str(error)
    return ""


@BOTH_REGIMES
def test_what_is_returned_suits_the_schedule(rank_pool, per_token):
    """A fresh scalar that is no view, and under R3 an integer count that int32 can take."""
    [(loss, num_tokens)] = rank_pool.run(_returned, per_token, world_size=1)
    assert loss == {"shape": [], "is_view": False, "requires_grad": True}
    assert num_tokens == (("torch.int32", 8) if per_token else None)


def _returned(per_token):
    [chunk] = build_scalar_chunks(Layout(), calculate_per_token_loss=per_token)
    aggregator = LossAggregator(
        prescribed_losses, loss_agg_mode="token-mean", model_config=unwrap(chunk).config
    )
    step = aggregator.begin_step(rows(1, 1).microbatches(0))
    [microbatch] = step.microbatches
    loss, *num_tokens, _ = step.loss_func(microbatch, chunk(microbatch["loss_mask"]))
    facts = {
        "shape": list(loss.shape),
        "is_view": loss._is_view(),
        "requires_grad": loss.requires_grad,
    }
    return facts, (str(num_tokens[0].dtype), int(num_tokens[0])) if num_tokens else None


def test_slicing_twice_and_fields_without_a_token_dimension(rank_pool):
    """Megatron's slicer changes its dict and cuts every field; slice_for_cp does neither."""
    for rank, facts in enumerate(rank_pool.run(_slices, world_size=2)):
        assert facts["width_before_and_after"] == [8, 8]
        assert facts["twice"] == [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert facts["sample_mask"] == [1, 1, 0]
        assert facts["attention_mask"] == [3, 1, 4, 8]
        assert facts["error"].startswith("Rows of width 6 cannot be split over 2")


def _slices():
    initialize_model_parallel(Layout(cp=2))
    microbatch = {
        "tokens": torch.arange(8).repeat(3, 1),
        "sample_mask": torch.tensor([1, 1, 0]),
        "attention_mask": torch.zeros(3, 1, 8, 8, dtype=torch.bool),
        "note": "kept",
    }
    before = microbatch["tokens"].shape[1]
    slice_for_cp(microbatch)
    sliced = slice_for_cp(microbatch)
    assert sliced["note"] == "kept"
    try:
        slice_for_cp({"tokens": torch.zeros(1, 6)})
    except ValueError as caught:
        error = str(caught)
    return {
        "width_before_and_after": [before, microbatch["tokens"].shape[1]],
        "twice": sliced["tokens"][0].tolist(),
        "sample_mask": sliced["sample_mask"].tolist(),
        "attention_mask": list(sliced["attention_mask"].shape),
        "error": error,
    }


def test_groups_from_a_process_group_collection(rank_pool):
    """A missing field raises by name, in releases that raise on it and in those that give None."""
    for same, message in rank_pool.run(_from_collection, world_size=4):
        assert same
        assert "lacks cp" in message and "whole world" in message


def _from_collection():
    from megatron.core.process_groups_config import ProcessGroupCollection

    initialize_model_parallel(Layout(dp=2, cp=2))
    expected = ParallelGroups.from_megatron()
    collection = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "pp", "tp"):
        setattr(collection, name, getattr(expected, name))
    try:
        ParallelGroups.from_megatron(collection)
    except LossAggError as error:
        message = str(error)
    collection.cp = expected.cp
    found = ParallelGroups.from_megatron(collection)
    without = found == dataclasses.replace(expected, tp_dp_cp=None)
    collection.tp_dp_cp = expected.tp_dp_cp
    sizes = found.dp_size, found.cp_size
    is_whole = ParallelGroups.from_megatron(collection) == expected
    return without and is_whole and sizes == (2, 2), message


def test_batched_p2p_between_two_interleaved_ranks_is_refused(rank_pool):
    """PP=2 with VPP=2 and batched messages gives wrong numbers without an error, so it raises."""
    for message in rank_pool.run(_batched_p2p, world_size=2):
        assert "overlap_p2p_comm=True" in message and "batch_p2p_comm=False" in message


def _batched_p2p():
    initialize_model_parallel(Layout(pp=2, vpp=2, num_microbatches=2))
    config = SimpleNamespace(
        calculate_per_token_loss=False, overlap_p2p_comm=False, batch_p2p_comm=True
    )
    aggregator = LossAggregator(prescribed_losses, loss_agg_mode="token-mean", model_config=config)
    try:
        aggregator.begin_step([{"loss_mask": torch.ones(1, 4)}] * 2)
    except LossAggError as error:
        return str(error)
    return ""


def test_wrap_needs_no_call_of_validate(rank_pool):
    """The checks hang on finalize_model_grads_func: each step enters once, and leaves with it."""
    for facts in rank_pool.run(_finalize_hook, world_size=2):
        assert facts == {
            "installed_before": False,
            "num_checks": 2,
            "waiting": [],
            "same_after_deepcopy": True,
        }


def _finalize_hook():
    import copy

    chunks, aggregator, microbatches = _pipeline_of_two(False, weights_key="loss_mask")
    config = unwrap(chunks[0]).config
    before = hasattr(config.finalize_model_grads_func, "participants")
    data = aggregator.wrap(iter(microbatches * 2), num_microbatches=4)
    step = SimpleNamespace(
        loss_func=aggregator.loss_func, data_iterator=lambda n: [data] * n, num_microbatches=4
    )
    with mock.patch.object(Step, "validate", autospec=True, side_effect=Step.validate) as validate:
        for _ in range(2):
            _run_schedule(chunks, step)
    hook = config.finalize_model_grads_func
    return {
        "installed_before": before,
        "num_checks": validate.call_count,
        "waiting": hook.participants,
        "same_after_deepcopy": copy.deepcopy(hook) is hook,
    }
