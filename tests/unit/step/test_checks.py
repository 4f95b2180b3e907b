"""A step in one process: what `validate` and `report` find, and what they let pass."""

from __future__ import annotations

import math

import pytest
import torch
from one_process import (
    REGIMES,
    fixture_f,
    make_aggregator,
    make_microbatch,
    run_schedule,
    run_step,
)

from megatron_lossagg import GlobalCounts, LossAggError, ScheduleContract
from megatron_lossagg.step.checks import local_problems
from megatron_lossagg.step.schedule_pass import SchedulePass


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((6, 3, 4), "num_tokens=6, but this rank's microbatches alone hold 7"),
        ((0, 0, 0), "num_tokens=0"),
        ((7, 0, 4), "num_valid_seqs=0, but .* hold 3"),
        ((7, 3, 3), "num_seqs=3, but .* hold 4"),
    ],
)
def test_known_counts_below_what_is_here_raise(counts, message):
    """Counts of something smaller than the global batch; 0 would silently train nothing."""
    step = make_aggregator().begin_step(fixture_f(1), counts=GlobalCounts(*counts))
    run_step(step)
    with pytest.raises(LossAggError, match=message):
        step.validate()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            (8, 3, 4),
            r"counts says num_tokens=8 .* hold 7\. The weights sum to .* mode's checksum is ",
        ),
        ((7, 4, 4), "counts says num_valid_seqs=4 for 'loss_mask', but .* of all ranks hold 3"),
        ((7, 3, 5), "counts says num_seqs=5 .* hold 4"),
    ],
)
@REGIMES
def test_known_counts_above_what_all_ranks_hold_raise(counts, message, per_token):
    """Counts that are too large are named: no microbatch was lost."""
    aggregator = make_aggregator(per_token=per_token)
    step = aggregator.begin_step(fixture_f(1), counts=GlobalCounts(*counts))
    run_step(step)
    with pytest.raises(LossAggError, match=message):
        step.validate()


@REGIMES
@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_schedule_takes_too_few_microbatches(num_taken, per_token):
    """Public report 10: M of the plan and of the schedule differ; both numbers are named."""
    step = make_aggregator(per_token=per_token).begin_step(fixture_f(4))
    run_schedule(step.loss_func, step.data_iterator(1)[0], num_taken)
    with pytest.raises(LossAggError, match=f"took {num_taken} microbatches .* planned for 4") as e:
        step.validate()
    assert f"loss_func ran {num_taken} times" in str(e.value)
    assert "num_microbatches=step.num_microbatches" in str(e.value)


def test_schedule_takes_too_many_microbatches():
    """The iterator says so at once, with what to do in a schedule and in a loop of one's own."""
    step = make_aggregator().begin_step(fixture_f(2))
    with pytest.raises(LossAggError, match=r"More than the 2 microbatches .* step\.microbatches"):
        run_schedule(step.loss_func, step.data_iterator(1)[0], 3)


@pytest.mark.parametrize("divide_by", [1, 3, 8, math.nan, math.inf])
def test_schedule_divides_by_another_number(divide_by):
    """Public report 20: the factor that was found and the one that was expected are named."""
    step = make_aggregator().begin_step(fixture_f(4))
    run_step(step, divide_by=divide_by)
    with pytest.raises(LossAggError, match=r"rescaled the returned loss by .*, expected 0\.25 in"):
        step.validate()


def test_one_wrong_division_among_right_ones_is_found():
    """Every microbatch is compared, not the first alone."""
    step = make_aggregator().begin_step(fixture_f(2))
    iterator = step.data_iterator(1)[0]
    for divide_by in (2, 3):
        microbatch = next(iterator)
        loss, _ = step.loss_func(microbatch, microbatch["losses"] + 1)
        loss /= divide_by
    with pytest.raises(LossAggError, match=r"rescaled the returned loss by 0\.333333"):
        step.validate()


@pytest.mark.parametrize(("value", "is_fault"), [(7e-45, False), (1e-20, True), (1.0, True)])
def test_losses_too_small_to_rescale_are_no_fault(value, is_fault):
    """A subnormal loss changes by rounding when it is divided; that proves nothing."""
    total = torch.tensor([value], dtype=torch.float32)
    returned = total[0] * 3  # M
    record = SchedulePass(num_loss_calls=3, returned=[(total, returned * 0.4)])
    contract = ScheduleContract("R1", dp_size=1, cp_size=1)
    problems = local_problems(record, contract, 3, loss_is_expected=True)
    assert bool(problems) == is_fault
    if is_fault:
        assert "rescaled the returned loss by 0.4, expected 0.333333" in problems[0]
    record.returned = [(total, returned / 3)]
    assert local_problems(record, contract, 3, loss_is_expected=True) == []


def test_losses_that_overflow_are_no_fault():
    """S is finite, but not in float32 what the plugin or, under CP, the schedule makes of it."""
    by_plugin = torch.tensor([2e38]), torch.tensor(2e38) * 3 / 3
    by_schedule = torch.tensor([3e38]), torch.tensor(3e38) * 2
    of_float64 = torch.ones(1, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    for pair, cp_size, num_microbatches in ((by_plugin, 1, 3), (by_schedule, 2, 1)):
        assert pair[1].item() == math.inf
        record = SchedulePass(num_loss_calls=2, returned=[pair, of_float64])
        contract = ScheduleContract("R4", dp_size=1, cp_size=cp_size)
        assert local_problems(record, contract, num_microbatches, loss_is_expected=False) == []


def test_lost_repeated_and_altered_weights_are_found():
    """The sum of all weights is compared with the checksum: a raw mask, a NaN, a repeat."""

    def run_with(change):
        step = make_aggregator(weights_key="loss_mask").begin_step(fixture_f(2))
        microbatches = step.microbatches
        change(microbatches)
        for microbatch in microbatches:
            loss, _ = step.loss_func(microbatch, microbatch["losses"])
            loss /= 2
        return step

    run_with(lambda microbatches: None).validate()
    for change in (
        lambda m: m[0].update(loss_mask=torch.ones(2, 4)),
        lambda m: m[1].update(loss_mask=m[1]["loss_mask"] * math.nan),
        lambda m: m.__setitem__(1, m[0]),
        lambda m: m[0].update(loss_mask=m[0]["loss_mask"] * 1.001),
        lambda m: m[1].update(loss_mask=m[1]["loss_mask"] * 0),
    ):
        with pytest.raises(LossAggError, match="The weights that loss_func saw sum to .* checksum"):
            run_with(change).validate()


def test_microbatches_of_another_step_are_found():
    """A stale step: loss_func of one step on the microbatches of the next."""
    aggregator = make_aggregator()
    stale = aggregator.begin_step(fixture_f(1))
    new = aggregator.begin_step([make_microbatch([[1.0, 1.0]], [[1, 1]]) for _ in range(2)])
    run_schedule(stale.loss_func, new.data_iterator(1)[0], 2)
    with pytest.raises(LossAggError, match="loss_func ran 2 times .* planned for 1"):
        stale.validate()
    with pytest.raises(LossAggError, match="loss_func ran 0 times .* planned for 2"):
        new.validate()


def test_validate_twice_and_replay():
    """Validate is repeatable; what happens after it is a new pass; data_iterator starts one."""
    step = make_aggregator().begin_step(fixture_f(2))
    for _ in range(2):
        store = run_step(step)
        step.validate()
        step.validate()
        assert step.report(store)["loss"] == pytest.approx(20 / 7)
    # A replay of saved microbatches, without an iterator of the step.
    run_schedule(step.loss_func, iter(step.microbatches), 2)
    step.validate()
    # An abandoned pass is forgotten.
    next(step.data_iterator(1)[0])
    run_step(step)
    step.validate()


def test_failed_validate_stays_failed():
    """Catching the error and asking again does not make it right; a new pass does."""
    step = make_aggregator().begin_step(fixture_f(2))
    run_schedule(step.loss_func, step.data_iterator(1)[0], 1)
    for _ in range(2):
        with pytest.raises(LossAggError, match="took 1 microbatches"):
            step.validate()
    run_step(step)
    step.validate()


def test_step_that_never_ran():
    """validate before the schedule: nothing was computed, so nothing may be optimised."""
    step = make_aggregator().begin_step(fixture_f(2))
    with pytest.raises(LossAggError, match="loss_func ran 0 times .* planned for 2"):
        step.validate()


def test_each_chunk_must_take_every_microbatch():
    """Iterators of model chunks are counted one by one."""
    step = make_aggregator().begin_step(fixture_f(2))
    first, second = step.data_iterator(2)
    run_schedule(step.loss_func, first, 2)
    next(second)
    with pytest.raises(LossAggError, match="took 1 microbatches from a data iterator"):
        step.validate()


def test_more_tokens_than_int32_are_refused_on_the_per_token_path():
    """Public report 25: Megatron sums num_tokens in int32, where 2^31 would wrap."""
    counts = GlobalCounts(2**31, 3, 4)
    step = make_aggregator(per_token=True).begin_step(fixture_f(1), counts=counts)
    run_step(step)
    with pytest.raises(LossAggError, match="2147483648 valid tokens, .* Set calculate_per_token"):
        step.validate()


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ([], "a list of 2 dicts, one per microbatch; got a list of 0"),
        (None, "got a NoneType of 0"),
        ({"loss": 1}, "got a dict of 0"),
        ([{"loss": torch.ones(2)}], "a list of 2 dicts, .* got a list of 1"),
        ([{"loss": torch.ones(2)}] * 3, "got a list of 3"),
        ([{"loss": torch.ones(2)}, {"lm loss": torch.ones(2)}], "got an entry with lm loss"),
        ([{"loss": 1.0}, {"loss": torch.ones(2)}], r"\[numerator, denominator\] under loss"),
        ([{"loss": torch.tensor(1.0)}] * 2, r"\[numerator, denominator\] under loss"),
        ([torch.ones(2)] * 2, "got an entry with Tensor"),
    ],
)
def test_report_on_wrong_things(store, message):
    """What came and what was expected; a part of the microbatches is no silent rescaling."""
    step = make_aggregator().begin_step(fixture_f(2))
    run_step(step)
    with pytest.raises(LossAggError, match=message):
        step.report(store)
