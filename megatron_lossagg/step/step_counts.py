"""Counts of the global batch that a report needs, from the ranks that know them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.objective.objective import Objective


class CountedPlan(Protocol):
    """What a plan tells of the global batch."""

    @property
    def counts(self) -> GlobalCounts:
        """Of the main mask."""

    @property
    def metric_divisors(self) -> Tensor | None:
        """Float64 [num_metric_sums]; None if there are no such metrics."""

    def counts_of(self, mask_key: str) -> GlobalCounts:
        """Of a mask."""

    def num_positions(self) -> Tensor:
        """Positions of the main masks, int64 []; -1 if that is not known."""


class StepCounts(NamedTuple):
    """On the host, as floats.

    Attributes:
        trained_tokens: valid tokens under the masks of the terms that train.
        value_factors: for the loss and each reported term 1, and NaN for a term that only reports
            and has no valid token.
        divisors: what each metric sum is divided by.
        counts: T, B and the positions of the main masks, or empty.
    """

    trained_tokens: float
    value_factors: list[float]
    divisors: list[float]
    counts: list[float]

    @classmethod
    def unpack(cls, values: Sequence[float], objective: Objective) -> StepCounts:
        """From what `pack_step_counts` gave on another rank."""
        num_values, num_sums = len(objective.names.values), len(objective.names.metric_sums)
        ends = (1 + num_values, 1 + num_values + num_sums)
        found = list(values)
        return cls(found[0], found[1 : ends[0]], found[ends[0] : ends[1]], found[ends[1] :])

    @classmethod
    def not_needed(cls, tokens_seen: float, objective: Objective) -> StepCounts:
        """Where no value depends on counts; `tokens_seen` is above 0 if a term saw a token."""
        return cls(tokens_seen, [1.0] * len(objective.names.values), [], [])

    def named_counts(self) -> dict[str, float]:
        """num_tokens T, num_seqs B, response_length T/B, masked_fraction 1 - T / positions."""
        if not self.counts:
            return {}
        num_tokens, num_seqs, num_positions = self.counts
        return {
            "num_tokens": num_tokens,
            "num_seqs": num_seqs,
            "response_length": num_tokens / num_seqs if num_seqs else 0.0,
            "masked_fraction": 1 - num_tokens / num_positions if num_positions > 0 else math.nan,
        }


def needs_step_counts(objective: Objective, *, reports_counts: bool) -> bool:
    """Whether reported values depend on counts: metrics do, and terms that only report."""
    may_only_report = [
        t for t in objective.reported_terms if callable(t.coefficient) or t.coefficient == 0
    ]
    return reports_counts or bool(objective.metric_sums) or bool(may_only_report)


def num_step_counts(objective: Objective, *, reports_counts: bool) -> int:
    """How many numbers `pack_step_counts` gives, on every rank."""
    names = objective.names
    return 1 + len(names.values) + len(names.metric_sums) + (3 if reports_counts else 0)


def pack_step_counts(
    plan: CountedPlan,
    objective: Objective,
    coefficients: Sequence[float],
    *,
    reports_counts: bool,
) -> Tensor:
    """The numbers of `StepCounts`, float64 [num_step_counts]. Waits for the counts."""
    by_mask = {key: plan.counts_of(key) for key in objective.mask_keys}
    one = torch.ones_like(plan.counts.num_tokens, dtype=torch.float64)
    factors = [one]
    for term, coefficient in zip(objective.terms, coefficients, strict=True):
        is_there = (coefficient != 0) | (by_mask[term.mask_key].num_tokens > 0)
        factors.append(torch.where(is_there, one, one * math.nan))
    trained = num_trained_tokens(objective, coefficients, by_mask).double().to(one.device)
    parts = [trained.view(1), torch.stack(factors[: len(objective.names.values)])]
    divisors = plan.metric_divisors
    if divisors is not None:
        parts.append(divisors.to(one.device))
    if reports_counts:
        counts = plan.counts
        is_valid = objective.weightings[0].spec.sequence_count == "valid"
        num_seqs = counts.num_valid_seqs if is_valid else counts.num_seqs
        positions = plan.num_positions().to(one.device)
        parts.append(torch.stack([counts.num_tokens, num_seqs, positions]).double())
    return torch.cat(parts)


def num_trained_tokens(
    objective: Objective, coefficients: Sequence[float], by_mask: Mapping[str, GlobalCounts]
) -> Tensor:
    """The valid tokens under the masks of terms whose coefficient is not 0, int64 []."""
    masks = objective.masks_of_terms_that_train(coefficients)
    counted = [by_mask[key].num_tokens for key in masks]
    return torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.int64)
