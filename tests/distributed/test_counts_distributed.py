"""Counts over gloo ranks: one collective of constant size, uneven ranks, int64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from steps_over_ranks import (
    TIMEOUT_S,
    CollectiveCounter,
    data_parallel_groups,
    make_microbatches,
    message_of,
)

from megatron_lossagg import ParallelGroups, count_global_batch
from megatron_lossagg.counts import count_local, start_reduction
from megatron_lossagg.counts.sequences import Sequences


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
