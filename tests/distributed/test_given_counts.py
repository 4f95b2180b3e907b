"""Counts that a driver gives are checked on every rank alike, so that none goes on alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import GlobalCounts, LossAggError, LossAggregator
from megatron_lossagg.testing import Layout
from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel


def _message(num_tokens_given, mode):
    """Of a step whose counts say another number of tokens on every rank; 4 are held by each."""
    initialize_model_parallel(Layout(dp=dist.get_world_size()))
    aggregator = LossAggregator(
        lambda output, microbatch: output,
        loss_agg_mode=mode,
        model_config=SimpleNamespace(calculate_per_token_loss=False),
    )
    ranks = dist.get_world_size()
    counts = GlobalCounts(num_tokens_given[dist.get_rank()], 2 * ranks, 2 * ranks)
    step = aggregator.begin_step([{"loss_mask": torch.ones(2, 2)}], counts=counts)
    [planned] = step.microbatches
    loss, _ = step.loss_func(planned, torch.ones(2, 2, requires_grad=True))
    try:
        step.validate()
    except LossAggError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    ("given", "is_right"), [((8, 8), True), ((8, 12), False), ((7, 9), False), ((12, 12), False)]
)
def test_every_rank_raises_or_none(rank_pool, mode, given, is_right):
    """Also where wrong numbers cancel, and on the rank whose own are right."""
    for own, message in zip(given, rank_pool.run(_message, given, mode, world_size=2), strict=True):
        if is_right:
            assert message == ""
        elif own < 4 or own == 8:
            assert "counts of another rank says another num_tokens" in message
        else:
            assert f"counts says num_tokens={own} for 'loss_mask'" in message
            assert "all ranks hold 8" in message
