"""A vocab-parallel loss of one rank's shard: another gradient, and no check saw it."""

from __future__ import annotations

import pytest
import torch

from megatron_lossagg.testing import Layout, RankFailure, TinyGPT, ragged_batch, run_global_batch
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan


def losses_of_own_shard(logits, microbatch):
    """-log softmax over this rank's part of the vocabulary alone."""
    labels = microbatch["labels"] % logits.shape[-1]
    return -torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize("text", ["TP=2 D=2 M=2", "TP=2 PP=2 M=2"])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_loss_of_the_own_shard_raises(rank_pool, text, planning, per_token):
    """On every rank of the last stage, before the optimizer, on the real schedule."""
    layout = Layout.parse(text)
    batch = ragged_batch(
        8, dp=layout.dp, num_microbatches=2, extra_fields=("advantages", "old_log_probs")
    )
    plan = AggregatorPlan("token-mean", planning=planning, token_losses=losses_of_own_shard)
    with pytest.raises(RankFailure, match="losses differ between tensor-parallel ranks"):
        rank_pool.run(
            run_global_batch,
            batch,
            layout,
            plan,
            gpt=TinyGPT(),
            calculate_per_token_loss=per_token,
            world_size=layout.world_size,
        )
