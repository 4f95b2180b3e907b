"""Token losses as `loss_fn` under the real schedules, with sequences spread over CP ranks.

The whole model's gradient against one process: the whole batch, naive formulas, plain autograd.
"""

from __future__ import annotations

import pytest
import torch
from pairs import all_pairs

from megatron_lossagg import ParallelGroups, token_losses
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import token_log_probs
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.case_runs import case_on_rank
from megatron_lossagg.verification.cases import GRADIENT_BOUNDS, Case, standard_batch
from megatron_lossagg.verification.references import references_on_rank


def plugin_losses(logits, microbatch):
    """GSPO + GMPO, weighted against rollouts of another engine, + a KL penalty."""
    mask, old = microbatch["loss_mask"], microbatch["old_log_probs"]
    cp_group = ParallelGroups.from_megatron().cp
    log_probs = token_log_probs(logits, microbatch["labels"])
    arguments = log_probs, old, microbatch["advantages"], mask
    gspo = token_losses.gspo(*arguments, clip_low=0.05, clip_high=0.1, cp_group=cp_group)
    gmpo = token_losses.gmpo(*arguments, clip_low=0.1, clip_high=0.2, cp_group=cp_group)
    weights = token_losses.truncated_importance_weights(
        old, 0.99 * old, mask, level="sequence", cap=0.9, cp_group=cp_group
    )
    kl = token_losses.kl_penalty(log_probs, old, mask, estimator="k3")
    return weights * (gspo + gmpo) + 0.1 * kl


def naive_losses(logits, rows):
    """The same of whole rows, from the formulas."""
    log_probs = token_log_probs(logits, rows["labels"])
    losses = torch.zeros_like(log_probs)
    for row in range(len(losses)):
        valid = rows["loss_mask"][row] != 0
        if not valid.any():
            continue
        x, old, a = (f[row][valid] for f in (log_probs, rows["old_log_probs"], rows["advantages"]))
        ratio = ((x - old).mean().detach() + x - x.detach()).exp()
        gspo = torch.maximum(-a * ratio, -a * ratio.clamp(0.95, 1.1))
        clipped = torch.where(a > 0, (x - old).clamp(max=0.2), (x - old).clamp(min=-0.1))
        gmpo = -a * clipped.mean().exp()
        weight = min(float((0.01 * old).sum().exp()), 0.9)
        kl = (old - x).exp() - (old - x) - 1
        losses[row, valid] = weight * (gspo + gmpo) + 0.1 * kl
    return losses


DEFAULT = [("C=2 D=2 M=2", "R3", "begin_step"), ("PP=2 C=2 M=4", "R1", "wrap")]
LAYOUTS = ("C=2 D=2 M=2", "C=4 M=2", "PP=2 C=2 M=4", "PP=2 VPP=2 C=2 M=4", "PP=2 D=2 M=4")


@pytest.mark.parametrize(
    ("text", "regime", "planning"),
    [
        *DEFAULT,
        *(
            pytest.param(*case, marks=pytest.mark.conformance)
            for case in all_pairs(LAYOUTS, ("R1", "R3"), ("begin_step", "wrap"))
            if case not in DEFAULT
        ),
    ],
)
def test_sequence_losses_in_a_step(rank_pool, text, regime, planning):
    """Gradient <= 1e-12 (R3: 1e-6) and reported loss <= 1e-12, in modes of tokens and sequences."""
    layout = Layout.parse(text)
    batch, gpt = standard_batch(layout), TinyGPT()
    plans = [
        AggregatorPlan(mode, planning=planning, token_losses=plugin_losses)
        for mode in ("token-mean", "seq-mean-token-mean")
    ]
    [references] = rank_pool.run(references_on_rank, gpt, batch, plans, naive_losses, world_size=1)
    results = rank_pool.run(
        case_on_rank,
        gpt,
        batch,
        Case(layout, regime, planning),
        plans,
        world_size=layout.world_size,
    )
    for index, (loss, gradients) in enumerate(references):
        assert relative_error(results[0][index][0], gradients) <= GRADIENT_BOUNDS[regime]
        for rank in results:
            if "loss" in rank[index][1]:
                assert abs(rank[index][1]["loss"] - loss) <= 1e-12 * abs(loss)
