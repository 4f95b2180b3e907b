"""Counts, checks and reports over gloo ranks: one collective, uneven ranks, no rank left waiting.

What the ranks do between planning and validating imitates a schedule just far enough to provoke
misuse; tests/megatron runs the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import LossAggError, LossAggregator, ParallelGroups, count_global_batch
from megatron_lossagg.counts import count_local, start_reduction
from megatron_lossagg.counts.sequences import Sequences

TIMEOUT_S = 60


def data_parallel_groups() -> ParallelGroups:
    return ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)


def make_aggregator(groups=None, **options) -> LossAggregator:
    per_token = options.pop("per_token", False)
    return LossAggregator(
        lambda output_tensor, microbatch: output_tensor,
        model_config=SimpleNamespace(calculate_per_token_loss=per_token),
        groups=data_parallel_groups() if groups is None else groups,
        **{"loss_agg_mode": "token-mean", "weight_dtype": torch.float64, **options},
    )


def make_microbatches(num_tokens_of_microbatches, loss=1.0):
    """One row of width 16 per microbatch, its first n tokens valid; losses as leaves."""
    return [
        {
            "losses": torch.full((1, 16), loss, dtype=torch.float64, requires_grad=True),
            "loss_mask": (torch.arange(16) < n).unsqueeze(0),
        }
        for n in num_tokens_of_microbatches
    ]


def run_microbatches(step, divide_by=None):
    store = []
    for microbatch in step.microbatches:
        loss, *num_tokens, report = step.loss_func(microbatch, microbatch["losses"])
        if not num_tokens:
            loss /= step.num_microbatches if divide_by is None else divide_by
        loss.backward()
        store.append(report)
    return store


def message_of(call, *args):
    """The text of the LossAggError that a call raises, or None."""
    try:
        call(*args)
    except LossAggError as error:
        return str(error)
    return None


class CollectiveCounter:
    """Counts collectives by name, and notes what all_reduce was given."""

    NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier", "reduce")

    def __init__(self):
        self.calls, self.tensors = [], []

    def __enter__(self):
        self._patches = [mock.patch.object(dist, n, self._counting(n)) for n in self.NAMES]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exc_info):
        for patch in self._patches:
            patch.stop()

    def _counting(self, name):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            self.calls.append(name)
            self.tensors.append((tensor.dtype, tuple(tensor.shape), kwargs.get("async_op", False)))
            return original(tensor, *args, **kwargs)

        return call


def _count_uneven(tokens_of_ranks):
    own = make_microbatches(tokens_of_ranks[dist.get_rank()])
    with CollectiveCounter() as collectives:
        counts = count_global_batch([m["loss_mask"] for m in own], data_parallel_groups())
    return (
        [int(counts.num_tokens), int(counts.num_valid_seqs), int(counts.num_seqs)],
        collectives.calls,
        collectives.tensors,
    )


@pytest.mark.parametrize(
    "tokens_of_ranks",
    [
        [[3], [5]],
        [[1, 2, 3, 4, 5], [0]],
        [[7], [1, 1], [0, 2, 0]],
        [[16] * 4, [1], [0], [2, 3]],
    ],
)
def test_one_collective_of_constant_size(rank_pool, tokens_of_ranks):
    """2 to 4 ranks with different numbers of microbatches: one all-reduce of 32 int64."""
    results = rank_pool.run(
        _count_uneven, tokens_of_ranks, world_size=len(tokens_of_ranks), timeout_s=TIMEOUT_S
    )
    tokens = [n for rank in tokens_of_ranks for n in rank]
    expected = [sum(tokens), sum(n > 0 for n in tokens), len(tokens)]
    for counts, calls, tensors in results:
        assert counts == expected
        assert calls == ["all_reduce"] and tensors == [(torch.int64, (32,), True)]


def _local_counts_after_reduction():
    mask = make_microbatches([(3, 5)[dist.get_rank()]])[0]["loss_mask"]
    local = count_local([Sequences.of(mask)])
    before = local.vector.clone()
    counts = start_reduction(local, data_parallel_groups()).wait()
    return (
        int(local.sequences[0].num_tokens),
        torch.equal(local.vector, before),
        counts.num_tokens,
    )


def test_reduction_leaves_local_counts_alone(rank_pool):
    """Public report 18: local counts stay 3 and 5, the global one is 8."""
    results = rank_pool.run(_local_counts_after_reduction, world_size=2, timeout_s=TIMEOUT_S)
    assert [(own, same, int(total)) for own, same, total in results] == [
        (3, True, 8),
        (5, True, 8),
    ]


def _count_2_to_the_30():
    local = count_local([Sequences.of(torch.ones(1, 1))])
    local.vector[local.vector.tolist().index(1, 7)] = 2**30  # num_tokens, the first count
    return int(start_reduction(local, data_parallel_groups()).wait().num_tokens)


def test_counts_add_beyond_int32(rank_pool):
    """Public report 25: three ranks with 2^30 tokens are 3221225472; int32 would go negative."""
    results = rank_pool.run(_count_2_to_the_30, world_size=3, timeout_s=TIMEOUT_S)
    assert results == [3221225472] * 3


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


def _count_replicated_masks():
    groups = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    own = [
        next(
            g for ranks, g in [(r, dist.new_group(r)) for r in of_axis] if dist.get_rank() in ranks
        )
        for of_axis in groups
    ]
    layout = ParallelGroups(dp=own[0], cp=own[1], dp_cp=dist.group.WORLD)
    counts = count_global_batch([torch.ones(1, 4)], layout)
    return [int(counts.num_tokens), int(counts.num_valid_seqs), int(counts.num_seqs)]


def test_context_parallel_ranks_hold_the_same_masks(rank_pool):
    """Public report 5: DP2 x CP2 with full masks of 4 tokens on every rank: T = 8, not 16."""
    results = rank_pool.run(_count_replicated_masks, world_size=4, timeout_s=TIMEOUT_S)
    assert results == [[8, 2, 2]] * 4


def _differently_configured(options_of_ranks):
    options = options_of_ranks[min(dist.get_rank(), 1)]
    step = make_aggregator(**options).begin_step(make_microbatches([3, 2]))
    run_microbatches(step)
    return message_of(step.validate)


NORM = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4}


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({}, {"loss_agg_mode": "token-sum"}),
        (NORM, NORM | {"loss_scale_factor": 5}),
        (NORM, NORM | {"norm_semantics": "seq-mean"}),
        ({}, {"sequence_count": "nominal"}),
        ({}, {"cp_gradient": "gathered"}),
        ({}, {"weight_dtype": torch.float32}),
        ({}, {"per_token": True}),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_differently_configured_ranks_raise_everywhere(rank_pool, first, others, world_size):
    """One odd rank: every rank raises in validate and says which arguments must agree."""
    messages = rank_pool.run(
        _differently_configured, [first, others], world_size=world_size, timeout_s=TIMEOUT_S
    )
    for message in messages:
        assert message is not None and "ranks were configured differently" in message
        assert "the same arguments on every rank" in message


def test_equally_configured_ranks_do_not_raise(rank_pool):
    """The same factor written as 4 and as 4.0 is one configuration."""
    assert rank_pool.run(
        _differently_configured,
        [NORM, NORM | {"loss_scale_factor": 4.0}],
        world_size=2,
        timeout_s=TIMEOUT_S,
    ) == [None, None]


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


def _settle(has_data):
    from megatron_lossagg.modes import ModeSpec
    from megatron_lossagg.weights.deferred import DeferredPlan, sum_over_ranks
    from megatron_lossagg.weights.microbatch import WeightOptions
    from megatron_lossagg.weights.weighting import Weighting

    options = WeightOptions(
        (Weighting(ModeSpec("seq-mean-token-sum")),), ("weights",), torch.float64
    )
    plan = DeferredPlan(options, 2, identity={})
    for index, microbatch in enumerate(make_microbatches([3, 0 if dist.get_rank() else 5])):
        plan.with_weights(microbatch, index)
    plan = plan if has_data or dist.get_rank() == 0 else None
    groups = data_parallel_groups()
    message = message_of(sum_over_ranks, plan, groups)
    if message is not None:
        return message
    counts = sum_over_ranks(plan, groups).wait()
    return [int(counts.num_tokens), int(counts.num_valid_seqs), int(counts.num_seqs)]


def test_deferred_counts_over_ranks(rank_pool):
    """8 and 3 tokens: 11 on both; a rank that brings none makes all of them raise."""
    assert rank_pool.run(_settle, True, world_size=2) == [[11, 3, 4]] * 2
    for message in rank_pool.run(_settle, False, world_size=2):
        assert message.startswith("denominators='deferred': 1 of 2 data-parallel ranks counted")
