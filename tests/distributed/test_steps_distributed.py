"""Values, checks and reports over gloo ranks: uneven ranks, no rank left waiting."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from steps_over_ranks import (
    TIMEOUT_S,
    CollectiveCounter,
    make_aggregator,
    make_microbatches,
    message_of,
    run_microbatches,
)

from megatron_lossagg import LossAggError, ParallelGroups


def _step_values(tokens_of_ranks, losses_of_ranks, options):
    rank = dist.get_rank()
    microbatches = make_microbatches(tokens_of_ranks[rank], losses_of_ranks[rank])
    collectives = {}
    with CollectiveCounter() as counter:
        step = make_aggregator(**options).begin_step(microbatches)
        store = run_microbatches(step)
        collectives["run"] = list(counter.calls)
        step.validate()
        collectives["validate"] = counter.calls[len(collectives["run"]) :]
        value = step.report(store)["loss"]
        collectives["all"] = list(counter.calls)
    gradient = sum(m["losses"].grad.sum() for m in microbatches)
    dist.all_reduce(gradient)
    return value, float(gradient), collectives, step.is_empty


@pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
@pytest.mark.parametrize(
    ("tokens_of_ranks", "losses_of_ranks", "mode", "value"),
    [
        ([[1], [9]], [10.0, 2.0], "token-mean", 2.8),  # public report 11
        ([[1, 1, 1], [1, 1, 0]], [3.0, 3.0], "token-mean", 3.0),  # public report 10
        ([[1, 1, 1], [1, 1]], [3.0, 3.0], "token-mean", 3.0),
        ([[2], [4, 0, 1]], [1.0, 5.0], "seq-mean-token-mean", 11 / 3),
        ([[2], [4, 0, 1]], [1.0, 5.0], "seq-mean-token-sum", 9.0),
        ([[3, 2], [0]], [1.0, 7.0], "token-mean", 1.0),
    ],
)
def test_value_over_uneven_ranks(
    rank_pool, tokens_of_ranks, losses_of_ranks, mode, value, per_token
):
    """The same J on every rank, its gradient, and three collectives: count, validate, report."""
    results = rank_pool.run(
        _step_values,
        tokens_of_ranks,
        losses_of_ranks,
        {"loss_agg_mode": mode, "per_token": per_token},
        world_size=2,
        timeout_s=TIMEOUT_S,
    )
    tokens = [n for rank in tokens_of_ranks for n in rank]
    num_seqs = sum(n > 0 for n in tokens)
    checksum = sum(tokens) / num_seqs if mode == "seq-mean-token-sum" else 1.0
    # R1: the mean over ranks that DDP takes. R3: the division by T in finalize.
    divisor = sum(tokens) if per_token else 2
    for found, gradient_sum, collectives, is_empty in results:
        assert found == pytest.approx(value, rel=1e-14)
        assert gradient_sum / divisor == pytest.approx(checksum, rel=1e-14)
        assert collectives == {
            "run": ["all_reduce"],
            "validate": ["all_reduce"],
            "all": ["all_reduce"] * 3,
        }
        assert not is_empty


@pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
)
def test_no_valid_token_on_any_rank(rank_pool, mode, per_token):
    """Public report 22: 0 and is_empty on every rank, gradients exactly 0."""
    results = rank_pool.run(
        _step_values,
        [[0], [0, 0]],
        [float("nan"), 1.0],
        {"loss_agg_mode": mode, "per_token": per_token} | {"sequence_count": "nominal"},
        world_size=2,
        timeout_s=TIMEOUT_S,
    )
    for value, gradient_sum, _, is_empty in results:
        assert value == 0.0 and gradient_sum == 0.0 and is_empty


def _fault_on_rank_1(fault):
    step = make_aggregator().begin_step(make_microbatches([3, 2]))
    is_faulty = dist.get_rank() == 1
    store = run_microbatches(step, divide_by=5 if is_faulty and fault == "division" else None)
    if is_faulty and fault == "replay":
        step.loss_func(step.microbatches[0], torch.ones(1, 16))
    if is_faulty and fault == "store":
        store = store[:1]
    return message_of(step.validate), message_of(step.report, store)


@pytest.mark.parametrize(
    ("fault", "own_message"),
    [
        ("division", "rescaled the returned loss by 0.2, expected 0.5"),
        ("replay", "loss_func ran 3 times"),
    ],
)
def test_fault_on_one_rank_raises_on_all(rank_pool, fault, own_message):
    """Public report 10: the faulty rank says what is wrong, the other that somebody failed."""
    (other, _), (own, _) = rank_pool.run(_fault_on_rank_1, fault, world_size=2, timeout_s=TIMEOUT_S)
    assert own_message in own
    assert "1 other rank(s)" in other and "Do not step the optimizer" in other


def test_report_with_missing_reports_on_one_rank_raises_on_all(rank_pool):
    """A rank that passes half of its reports neither falsifies the sum nor lets others wait."""
    (_, other), (_, own) = rank_pool.run(
        _fault_on_rank_1, "store", world_size=2, timeout_s=TIMEOUT_S
    )
    assert "a list of 2 dicts, one per microbatch; got a list of 1" in own
    assert "report() failed on 1 last-stage rank(s)" in other


def _report_over_pipeline(broadcast, lose_reports, is_empty):
    groups = ParallelGroups(pp=dist.group.WORLD)
    aggregator = make_aggregator(groups)
    if dist.get_rank() == 0:
        step = aggregator.begin_step(None, num_microbatches=2)
        store = []
    else:
        step = aggregator.begin_step(make_microbatches([0, 0] if is_empty else [3, 1], 2.0))
        store = run_microbatches(step)[: 1 if lose_reports else 2]
    step.validate()
    try:
        return step.report(store, broadcast_over_pipeline=broadcast), step.is_empty
    except LossAggError as error:
        return str(error)


@pytest.mark.parametrize("is_empty", [False, True])
def test_report_reaches_every_stage(rank_pool, is_empty):
    """A stage without data gets J and learns whether the batch is empty."""
    results = rank_pool.run(
        _report_over_pipeline, True, False, is_empty, world_size=2, timeout_s=TIMEOUT_S
    )
    assert results == [({"loss": 0.0 if is_empty else 2.0}, is_empty)] * 2


def test_report_may_stay_on_the_last_stage(rank_pool):
    """Without the broadcast an earlier stage gets nothing, and does not know is_empty."""
    first, last = rank_pool.run(
        _report_over_pipeline, False, False, False, world_size=2, timeout_s=TIMEOUT_S
    )
    assert "is_empty is not known yet" in first
    assert last == ({"loss": 2.0}, False)


def test_report_that_fails_on_the_last_stage_raises_on_every_stage(rank_pool):
    """An earlier stage does not wait for a broadcast that never comes."""
    first, last = rank_pool.run(
        _report_over_pipeline, True, True, False, world_size=2, timeout_s=TIMEOUT_S
    )
    assert "report() failed on 1 last-stage rank(s)" in first
    assert "got a list of 1" in last
