"""Wrapped iterators: steps begin at the first next, end of data, chunks, ranks without any."""

from __future__ import annotations

import itertools

import pytest
import torch
from one_process import (
    FakeGroup,
    fixture_f,
    make_aggregator,
    make_microbatch,
    model_config,
    ones,
    run_schedule,
)

from megatron_lossagg import LossAggError, ParallelGroups


def total(store):
    """J as Megatron-LM's train_step sums it: numerators over denominators."""
    numerator, denominator = torch.stack([entry["loss"] for entry in store]).sum(dim=0).tolist()
    return numerator / denominator


def test_steps_follow_the_schedule():
    """Public report 21: M=4, then M=1 from a function; each step is counted for itself."""
    aggregator, num_microbatches = make_aggregator(), [4]
    raw = iter([*ones(4, 2.0), *ones(1, 5.0)])
    wrapped = aggregator.wrap(raw, num_microbatches=lambda: num_microbatches[0])
    assert total(run_schedule(aggregator.loss_func, wrapped, 4)) == 2.0
    aggregator.validate()
    num_microbatches[0] = 1
    assert total(run_schedule(aggregator.loss_func, wrapped, 1)) == 5.0
    aggregator.validate()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(wrapped)


def test_nothing_is_taken_before_the_first_next():
    """wrap itself reads no data and plans nothing."""
    taken = []
    raw = (taken.append(i) or m for i, m in enumerate(ones(4)))
    wrapped = make_aggregator().wrap(raw, num_microbatches=2)
    assert taken == [] and iter(wrapped) is wrapped
    next(wrapped)
    assert taken == [0, 1]


def test_yielded_dicts_are_copies():
    """Weights added, sample_mask left out, the loader's dict as it was."""
    microbatch = make_microbatch([[1.0]], [[1]], sample_mask=torch.ones(1))
    yielded = next(make_aggregator().wrap(iter([microbatch]), num_microbatches=1))
    assert set(yielded) == {"losses", "loss_mask", "loss_weights"}
    assert set(microbatch) == {"losses", "loss_mask", "sample_mask"}
    assert yielded["losses"] is microbatch["losses"]


@pytest.mark.parametrize("shared", [True, False], ids=["one-object", "equal-iterators"])
def test_chunks_share_one_plan(shared):
    """Chunk iterators that are one object, or yield the same sequence, get the same weights."""
    microbatches = [*fixture_f(2), *ones(2)]
    raw = iter(microbatches)
    raws = [raw, raw] if shared else [iter(microbatches), iter(microbatches)]
    aggregator = make_aggregator()
    first, second = aggregator.wrap(raws, num_microbatches=2)
    for _ in range(2):
        for _ in range(2):
            ahead = next(first)
        run_schedule(aggregator.loss_func, second, 2)
        aggregator.validate()
    assert torch.equal(ahead["loss_weights"], torch.full((1, 2), 0.25).double())


def test_chunks_that_take_different_numbers():
    """Both numbers are named."""
    numbers = itertools.chain([2], itertools.repeat(1))
    first, second = make_aggregator().wrap(
        [iter(ones(2)), iter(ones(2))], num_microbatches=lambda: next(numbers)
    )
    next(first)
    with pytest.raises(LossAggError, match="take 2 and 1 microbatches in one step"):
        next(second)


def test_none_passes_through():
    """A rank or a chunk without data keeps its None; lists stay lists."""
    aggregator = make_aggregator()
    assert aggregator.wrap(None, num_microbatches=1) is None
    assert aggregator.wrap([None, None], num_microbatches=1) == [None, None]
    wrapped = aggregator.wrap((None, iter(ones(1))), num_microbatches=1)
    assert isinstance(wrapped, list) and wrapped[0] is None
    assert "loss_weights" in next(wrapped[1])


@pytest.mark.parametrize("wrong", [ones(1), [ones(1)], {"loss_mask": 1}, torch.ones(1), range(3)])
def test_what_is_no_iterator(wrong):
    """A list of microbatches, a dict or a loader: the message says iter(...) or a list of them."""
    with pytest.raises(TypeError, match=r"expects an iterator .* got .*Pass iter\(loader\)"):
        make_aggregator().wrap(wrong, num_microbatches=1)


def test_iterator_with_next_alone():
    """Megatron's RerunDataIterator has __next__ but no __iter__."""

    class NextAlone:
        def __init__(self, items):
            self.items = items

        def __next__(self):
            if not self.items:
                raise StopIteration
            return self.items.pop(0)

    wrapped = make_aggregator().wrap(NextAlone(ones(2)), num_microbatches=2)
    assert len(list(wrapped)) == 2


def test_empty_list_of_chunks():
    """No chunk at all is a mistake, not a rank without data."""
    with pytest.raises(
        ValueError, match=r"empty list; expected one iterator \(or None\) per model"
    ):
        make_aggregator().wrap([], num_microbatches=1)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_data_that_ends_in_mid_step(num_chunks):
    """The rest is never planned as a shorter step, however often and by whom it is asked for."""
    raw = iter(ones(3))
    wrapped = make_aggregator().wrap([raw] * num_chunks, num_microbatches=2)
    for iterator in wrapped:
        next(iterator), next(iterator)
    for iterator in wrapped * 2:
        with pytest.raises(LossAggError, match="ended after 1 of 2 microbatches .* Drop the last"):
            next(iterator)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ((1, 2), TypeError, "Microbatch 0 is a tuple"),
        ({"tokens": 1}, ValueError, "Microbatch 0 has no 'loss_mask'; its keys are tokens"),
        (make_microbatch([[1.0]], [[3]]), ValueError, "only 0 and 1"),
    ],
)
def test_items_that_cannot_be_planned(item, error, message):
    """The same checks as in begin_step, again at every next: a step is not skipped."""
    wrapped = make_aggregator().wrap(iter([item, *ones(1)]), num_microbatches=1)
    for _ in range(2):
        with pytest.raises(error, match=message):
            next(wrapped)


def test_reused_iterator():
    """Wrapped again, or by two wraps, an iterator goes on where it is: no microbatch is lost."""
    raw = iter([*ones(1, 1.0), *ones(1, 2.0), *ones(1, 3.0)])
    aggregator = make_aggregator()
    first = aggregator.wrap(raw, num_microbatches=1)
    second = aggregator.wrap(raw, num_microbatches=1)
    values = []
    for wrapped in (first, second, first):
        values.append(total(run_schedule(aggregator.loss_func, wrapped, 1)))
        aggregator.validate()
    assert values == [1.0, 2.0, 3.0]


def test_training_and_evaluation_streams_on_one_aggregator():
    """loss_func belongs to the stream that yielded last; abandoned steps do not leak."""
    aggregator = make_aggregator()
    train = aggregator.wrap(iter(ones(4, 2.0)), num_microbatches=2)
    evaluate = aggregator.wrap(iter(ones(6, 7.0)), num_microbatches=3)
    assert total(run_schedule(aggregator.loss_func, train, 2)) == 2.0
    aggregator.validate()
    with torch.no_grad():
        store = run_schedule(aggregator.loss_func, evaluate, 3, backward=False)
    assert total(store) == pytest.approx(7.0)
    run_schedule(aggregator.loss_func, train, 1, divide_by=2)
    next(evaluate)
    run_schedule(aggregator.loss_func, train, 1, divide_by=2)
    aggregator.validate()


@pytest.mark.parametrize("num_run", [1, 3])
def test_schedule_with_another_number_of_microbatches(num_run):
    """Public report 10: wrap says 2, the schedule runs 1 or 3; validate raises."""
    aggregator = make_aggregator()
    wrapped = aggregator.wrap(iter(ones(8)), num_microbatches=2)
    run_schedule(aggregator.loss_func, wrapped, num_run)
    with pytest.raises(LossAggError, match="planned for 2.*wrap"):
        aggregator.validate()


def test_validate_before_anything_ran():
    """Nothing was planned on this rank: nothing to check, no error (an earlier stage)."""
    make_aggregator().validate()


def test_validate_twice_in_a_row():
    """By the hook and by hand: the same answer, right or wrong."""
    aggregator = make_aggregator()
    wrapped = aggregator.wrap(iter(ones(4)), num_microbatches=2)
    run_schedule(aggregator.loss_func, wrapped, 2)
    aggregator.validate()
    aggregator.validate()
    run_schedule(aggregator.loss_func, wrapped, 1)
    for _ in range(2):
        with pytest.raises(LossAggError, match="took 1 microbatches"):
            aggregator.validate()


def test_going_on_after_a_caught_fault():
    """Catching a fault does not turn into an unrelated error at the next microbatch."""
    aggregator = make_aggregator()
    wrapped = aggregator.wrap(iter(ones(8)), num_microbatches=4)
    run_schedule(aggregator.loss_func, wrapped, 2)
    with pytest.raises(LossAggError, match="took 2 microbatches .* planned for 4"):
        aggregator.validate()
    run_schedule(aggregator.loss_func, wrapped, 2)
    with pytest.raises(LossAggError, match="loss_func ran 2 times"):
        aggregator.validate()


def test_replay_of_saved_microbatches():
    """Rerun machinery runs forward and backward again on what it saved: a new, right pass."""
    aggregator = make_aggregator()
    wrapped = aggregator.wrap(iter(ones(2)), num_microbatches=2)
    saved = [next(wrapped), next(wrapped)]
    for _ in range(3):
        run_schedule(aggregator.loss_func, iter(saved), 2)
        aggregator.validate()


def test_rank_that_gets_its_weights_by_broadcast(monkeypatch):
    """wrap(None) on a last-stage rank: steps begin and end by counting calls, also if M changes."""
    # The other rank has the same numbers.
    monkeypatch.setattr("megatron_lossagg.step.checks.tp_problems", lambda *args: [])
    number = [2]
    source = make_aggregator(weights_key="loss_mask")
    data = source.wrap(iter(ones(9)), num_microbatches=lambda: number[0])
    aggregator = make_aggregator(weights_key="loss_mask", groups=ParallelGroups(tp=FakeGroup(2, 1)))
    for _ in range(2):  # a trainer may wrap anew for every step
        assert aggregator.wrap(None, num_microbatches=lambda: number[0]) is None
    for number[0], is_training in ((2, True), (2, False), (2, True), (1, False), (2, True)):
        store = run_schedule(aggregator.loss_func, data, number[0], backward=is_training)
        assert total(store) == pytest.approx(1.0)
        if is_training:
            aggregator.validate()


def test_rank_without_data_cannot_tell_two_streams_apart():
    """Training and evaluation with different M there: refused with the way out."""
    aggregator = make_aggregator(groups=ParallelGroups(tp=FakeGroup(2, 1)))
    aggregator.wrap(None, num_microbatches=2)
    aggregator.wrap(None, num_microbatches=3)
    with pytest.raises(LossAggError, match=r"streams of \[2, 3\] microbatches.*One|one LossAgg"):
        aggregator.loss_func({"loss_weights": torch.ones(1, 1)}, torch.ones(1, 1))


@pytest.mark.parametrize("shared", [True, False], ids=["one-object", "equal-iterators"])
@pytest.mark.parametrize("taken", [(1, 0), (2, 0), (2, 1), (1, 1)])
def test_chunks_are_realigned_after_a_fault(taken, shared):
    """However far each chunk had come, both go on with the same whole step."""
    raw = iter(ones(8))
    raws = [raw, raw] if shared else [iter(ones(8)), iter(ones(8))]
    numbered = [({**m, "number": i} for i, m in enumerate(r)) for r in raws]
    numbered = [numbered[0]] * 2 if shared else numbered
    # As where the schedule finalizes gradients, so that runs are seen to end.
    config = model_config(finalize_model_grads_func=print)
    chunks = make_aggregator(model_config=config).wrap(numbered, num_microbatches=2)
    schedules = type(torch)("megatron.core.pipeline_parallel.schedules")
    code = """
def forward_backward(chunks, taken):
    total_num_tokens = token()
    found = [[next(chunk)["number"] for _ in range(n)] for chunk, n in zip(chunks, taken)]
    if found[-1] and len(found[0]) == len(found[-1]) == 2:
        return found
    raise ArithmeticError
"""
    vars(schedules).update(token=lambda: torch.zeros(1))
    exec(code, vars(schedules))
    with pytest.raises(ArithmeticError):
        schedules.forward_backward(chunks, taken)
    first, second = schedules.forward_backward(chunks, (2, 2))
    assert first == second == [2, 3]
    first, second = schedules.forward_backward(chunks, (2, 2))
    assert first == second == [4, 5]
