"""slice_for_cp with the installed Megatron-Core's own slicer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import ParallelGroups, slice_for_cp


def _slice(width):
    groups = ParallelGroups(cp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    tokens = torch.arange(2 * width).view(2, width)
    microbatch = {
        "tokens": tokens,
        "loss_mask": tokens % 2 == 0,
        "loss_weights": (tokens.double() / 7).t().contiguous().t(),
        "attention_mask": torch.ones(2, 1, width, width, dtype=torch.bool).tril(),
        "rewards": torch.ones(2),
        "position_ids": None,
    }
    part = slice_for_cp(slice_for_cp(microbatch, ParallelGroups.single_process()), groups)
    again = slice_for_cp(microbatch, groups)
    assert all(torch.equal(part[k], again[k]) for k in part if part[k] is not None)
    return {key: None if value is None else value.tolist() for key, value in part.items()}


@pytest.mark.parametrize(("world_size", "width"), [(2, 8), (4, 8)])
def test_megatrons_slicer_cuts_weights_as_it_cuts_tokens(rank_pool, world_size, width):
    """Rank r gets chunks r and 2C-1-r of every field; nothing is lost, the dict is not changed."""
    pytest.importorskip("megatron.core")
    parts = rank_pool.run(_slice, width, world_size=world_size, timeout_s=120)
    chunk = width // (2 * world_size)
    for rank, part in enumerate(parts):
        last = 2 * world_size - 1 - rank
        columns = [c for c in range(width) if c // chunk in (rank, last)]
        tokens = [[row * width + c for c in columns] for row in range(2)]
        assert part["tokens"] == tokens
        assert part["loss_mask"] == [[t % 2 == 0 for t in row] for row in tokens]
        assert part["loss_weights"] == [[t / 7 for t in row] for row in tokens]
        causal = [[c <= r for c in range(width)] for r in columns]
        assert part["attention_mask"] == [[causal], [causal]]
        assert part["rewards"] == [1.0, 1.0] and part["position_ids"] is None
