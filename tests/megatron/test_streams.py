"""Wrapped iterators on the real schedules: their iterations, faults midway, evaluating first."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from objectives import LAYOUTS
from prescribed import prescribed_losses
from rank_runs import J, assert_gradient, on_ranks

from megatron_lossagg import LossTerm

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])


# Each stream has its own iteration.


def annealed(iteration):
    return 1e-3 / iteration  # raises at 0, which is nobody's iteration


def _two_streams(rank, where):
    has_data = where == "all" or rank.is_last_stage
    aggregator = rank.aggregator(
        None,
        loss_agg_mode=None,
        terms=[LossTerm("term", prescribed_losses, "token-mean", coefficient=annealed)],
    )
    number = rank.layout.num_microbatches
    training = (
        aggregator.wrap(rank.stream(1), num_microbatches=number, iteration=lambda: 4)
        if has_data
        else None
    )
    evaluation = (
        aggregator.wrap(
            rank.stream(1), num_microbatches=number, iteration=lambda: 1, forward_only=True
        )
        if has_data
        else None
    )
    wrapped = training if has_data else rank.stream(1)
    store, gradient = rank.run(aggregator.loss_func, wrapped)
    trained = aggregator.report(store)["loss"]
    with torch.no_grad():
        wrapped = evaluation if has_data else rank.stream(1)
        store, _ = rank.run(aggregator.loss_func, wrapped, forward_only=True)
    return gradient, trained, aggregator.report(store)["loss"]


@BOTH_REGIMES
@pytest.mark.parametrize("where", ["all", "last-stage"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_stream_has_its_own_iteration(rank_pool, layout, where, per_token):
    """A second `wrap` leaves the first one's; a rank without a step evaluates no coefficient."""
    results = on_ranks(rank_pool, _two_streams, layout, per_token, where)
    assert_gradient([gradient for gradient, *_ in results], J * 1e-3 / 4, per_token)
    for _, trained, evaluated in results:
        assert trained == pytest.approx(J * 1e-3 / 4, rel=1e-12)
        assert evaluated == pytest.approx(J * 1e-3, rel=1e-12)


# A microbatch whose loss has no graph.


def without_graph_where_long(output, microbatch):
    losses = prescribed_losses(output, microbatch)
    is_long = (microbatch["losses"] == 3).any()  # the microbatch of the sequence 1 2 3 4
    return losses.detach() if is_long else losses


def _no_graph(rank, planning):
    aggregator = rank.aggregator(without_graph_where_long)
    number = rank.layout.num_microbatches
    if planning == "wrap":
        step, data = aggregator, aggregator.wrap(rank.stream(1), num_microbatches=number)
    else:
        step = aggregator.begin_step(rank.microbatches)
        [data] = step.data_iterator()
    store, gradient = rank.run(step.loss_func, data)
    if planning == "begin_step":
        step.validate()
    return gradient, step.report(store)["loss"]


@BOTH_REGIMES
@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize("layout", ["D=1 M=4", "D=2 M=2", "PP=2 M=4"])
def test_a_microbatch_whose_loss_has_no_graph(rank_pool, layout, planning, per_token):
    """Relax#252: its advantages are 0; loss 20/7, the gradient without it, and no complaint."""
    results = on_ranks(rank_pool, _no_graph, layout, per_token, planning)
    assert_gradient([gradient for gradient, _ in results], 10 / 7, per_token)
    assert all(loss == pytest.approx(J, rel=1e-12) for _, loss in results)


# After an exception in the middle of a step.


@dataclass
class Fault(Exception):
    """Of a model or a loss."""

    where: str


def _fault(rank, where, after):
    calls = []

    def fail(place):
        calls.append(place)
        if place == where and calls.count(place) == after + 1:
            raise Fault(where)

    def loss_fn(output, microbatch):
        fail("loss")
        return prescribed_losses(output, microbatch)

    aggregator = rank.aggregator(loss_fn)
    wrapped = aggregator.wrap(rank.stream(3), num_microbatches=rank.layout.num_microbatches)
    found = []
    with pytest.raises(Fault):
        rank.run(aggregator.loss_func, wrapped, before_loss=lambda part: fail("model"))
    for _ in range(2):
        store, gradient = rank.run(aggregator.loss_func, wrapped)
        found.append((gradient, aggregator.report(store)["loss"]))
    left = len(list(wrapped))
    return found, left


@BOTH_REGIMES
@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("layout", ["D=1 M=4", "D=2 M=2", "C=2 D=2 M=2"])
def test_after_a_fault_the_iterator_goes_on_with_a_whole_step(
    rank_pool, layout, after, where, per_token
):
    """At the first or second microbatch, in the model or in `loss_fn`: the next step is whole."""
    for found, left in on_ranks(rank_pool, _fault, layout, per_token, where, after):
        assert left == 0
        for gradient, loss in found:
            assert_gradient([gradient], J, per_token)
            assert loss == pytest.approx(J, rel=1e-12)


def _fault_outside_of_the_schedule(rank):
    aggregator = rank.aggregator()
    wrapped = aggregator.wrap(rank.stream(3), num_microbatches=rank.layout.num_microbatches)
    next(wrapped)  # and then a loop of another kind fails
    aggregator.abandon_step()
    store, gradient = rank.run(aggregator.loss_func, wrapped)
    return gradient, aggregator.report(store)["loss"]


@BOTH_REGIMES
def test_a_loop_of_another_kind_says_that_it_goes_on(rank_pool, per_token):
    """Where the fault came outside of Megatron's schedules: `abandon_step`, on every stage."""
    results = on_ranks(rank_pool, _fault_outside_of_the_schedule, "PP=2 M=4", per_token)
    assert_gradient([gradient for gradient, _ in results], J, per_token)
    assert all(loss == pytest.approx(J, rel=1e-12) for _, loss in results)


# Evaluating first.


def _evaluate_then_train(rank, compile):
    aggregator = rank.aggregator(compile=compile)
    step = aggregator.begin_step(rank.microbatches)
    with torch.inference_mode():
        store, _ = rank.run(step.loss_func, step.data_iterator()[0], forward_only=True)
        evaluated = step.report(store)["loss"]
    store, gradient = rank.run(step.loss_func, step.data_iterator()[0])
    step.validate()
    return gradient, evaluated, step.report(store)["loss"]


@BOTH_REGIMES
@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compile"])
@pytest.mark.parametrize("layout", ["D=2 M=2"])
def test_evaluating_in_inference_mode_and_then_training(rank_pool, layout, compile, per_token):
    """The weights that the evaluation made are those of training."""
    results = on_ranks(rank_pool, _evaluate_then_train, layout, per_token, compile)
    assert_gradient([gradient for gradient, *_ in results], J, per_token)
    for _, *losses in results:
        assert losses == [pytest.approx(J, rel=1e-12)] * 2


# What stays on the config.


def _many_aggregators(rank):
    number = rank.layout.num_microbatches
    for _ in range(20):
        aggregator = rank.aggregator()
        wrapped = aggregator.wrap(rank.stream(1), num_microbatches=number)
        rank.run(aggregator.loss_func, wrapped)
    failing = rank.aggregator(_fails)
    with suppress(Fault):
        rank.run(failing.loss_func, failing.wrap(rank.stream(1), num_microbatches=number))
    after_failure = rank.config.finalize_model_grads_func.participants
    incomplete = rank.aggregator()
    next(incomplete.wrap(rank.stream(1), num_microbatches=number))
    waiting = len(rank.config.finalize_model_grads_func.participants)
    # A new one on the same config, while the others are alive, and after they are gone.
    found = []
    for _ in range(2):
        aggregator = rank.aggregator()
        wrapped = aggregator.wrap(rank.stream(1), num_microbatches=number)
        store, gradient = rank.run(aggregator.loss_func, wrapped)
        found.append((gradient, aggregator.report(store)["loss"]))
        incomplete = failing = None
        gc.collect()
    return found, after_failure, waiting, rank.config.finalize_model_grads_func.participants


def _fails(output, microbatch):
    raise Fault("loss")


@BOTH_REGIMES
def test_an_aggregator_leaves_nothing_behind(rank_pool, per_token):
    """Steps that ended, failed or never ran meet no later gradient of the same config."""
    for found, after_failure, waiting, left in on_ranks(
        rank_pool, _many_aggregators, "D=2 M=2", per_token
    ):
        assert after_failure == [] and waiting == 1 and left == []
        for gradient, loss in found:
            assert_gradient([gradient], J, per_token)
            assert loss == pytest.approx(J, rel=1e-12)


# Steps of both kinds on one aggregator.


def _evaluate_wrapped_then_train_planned(rank):
    aggregator = rank.aggregator()
    number = rank.layout.num_microbatches
    data = aggregator.wrap(rank.stream(1), num_microbatches=number, forward_only=True)
    with torch.no_grad():
        store, _ = rank.run(aggregator.loss_func, data, forward_only=True)
    evaluated = aggregator.report(store)["loss"]
    empty = [{**m, "loss_mask": 0 * m["loss_mask"]} for m in rank.microbatches]
    found = []
    for microbatches in (rank.microbatches, empty, rank.microbatches):
        step = aggregator.begin_step(microbatches)
        store, gradient = rank.run(step.loss_func, step.data_iterator()[0])
        step.validate()
        found.append((gradient, step.report(store)["loss"], aggregator.share_is_empty()))
    return evaluated, found


@BOTH_REGIMES
@pytest.mark.parametrize("layout", ["D=2 M=2", "PP=2 M=4"])
def test_a_wrapped_evaluation_and_planned_steps(rank_pool, layout, per_token):
    """The checks of one kind are not those of the other, and emptiness is that of the last step."""
    for evaluated, found in on_ranks(
        rank_pool, _evaluate_wrapped_then_train_planned, layout, per_token
    ):
        assert evaluated == pytest.approx(J, rel=1e-12)
        for (gradient, loss, is_empty), expected in zip(found, (J, 0.0, J), strict=True):
            assert_gradient([gradient], expected, per_token)
            assert loss == pytest.approx(expected) and is_empty == (expected == 0)


def _several_runs_make_a_step(rank):
    """The schedule is called M times with one microbatch, and gradients finalized by hand."""
    from megatron.core.distributed import finalize_model_grads

    rank.config.finalize_model_grads_func = None
    aggregator = rank.aggregator()
    number = rank.layout.num_microbatches
    wrapped = aggregator.wrap(rank.stream(1), num_microbatches=number)
    one = dataclasses.replace(rank.layout, num_microbatches=1)
    for chunk in rank.chunks:
        chunk.zero_grad_buffer()
    rank.layout, zero = one, [chunk.zero_grad_buffer for chunk in rank.chunks]
    for chunk in rank.chunks:
        chunk.zero_grad_buffer = lambda: None
    for _ in range(number):
        rank.run(aggregator.loss_func, wrapped)
    for chunk, original in zip(rank.chunks, zero, strict=True):
        chunk.zero_grad_buffer = original
    finalize_model_grads(rank.chunks, torch.tensor(7, dtype=torch.int32))
    aggregator.validate()
    return rank.gradient(), len(list(wrapped))


def test_several_runs_of_the_schedule_may_make_one_step(rank_pool):
    """With the per-token flag nothing is divided per run: no microbatch is dropped between runs."""
    [(gradient, left)] = on_ranks(rank_pool, _several_runs_make_a_step, "D=1 M=4", True)
    assert left == 0
    assert_gradient([gradient], J, True)
