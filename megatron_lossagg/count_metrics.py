"""Counts of the global batch as metrics of a report."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lossagg.deferred import DeferredPlan
from megatron_lossagg.objective import Objective
from megatron_lossagg.plan import WeightPlan

# T, B and the positions of the main masks.
NUM_COUNT_FACTS = 3


def count_facts(plan: WeightPlan | DeferredPlan | None, objective: Objective) -> Tensor | None:
    """float64 [NUM_COUNT_FACTS] on a rank that knows them; None elsewhere."""
    if not isinstance(plan, WeightPlan):
        return None
    counts = plan.counts
    is_valid = objective.weightings[0].spec.sequence_count == "valid"
    num_seqs = counts.num_valid_seqs if is_valid else counts.num_seqs
    return torch.stack([counts.num_tokens, num_seqs, plan.num_positions()]).double()


def count_metrics(facts: Tensor) -> dict[str, float]:
    """num_tokens T, num_seqs B, response_length T/B, masked_fraction 1 - T / positions."""
    num_tokens, num_seqs, num_positions = facts.tolist()
    return {
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "response_length": num_tokens / num_seqs if num_seqs else 0.0,
        "masked_fraction": 1 - num_tokens / num_positions if num_positions > 0 else math.nan,
    }
