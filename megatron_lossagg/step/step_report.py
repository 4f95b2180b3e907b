"""The report of a step: its values and counts, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.report import LocalReport, Totals, extreme_values, reduce_report
from megatron_lossagg.step.schedule_pass import SchedulePass
from megatron_lossagg.weights.deferred import sum_over_ranks
from megatron_lossagg.weights.step_weights import StepWeights


class StepReport(NamedTuple):
    """Values by name; and whether no term that trains has a valid token."""

    values: dict[str, float]
    is_empty: bool


def step_report(
    forward_data_store: Sequence[Mapping[str, Tensor]],
    plan: StepWeights | None,
    run: SchedulePass,
    context: StepContext,
    *,
    problem: str | None,
    over_pipeline: bool,
) -> StepReport | None:
    """`Step.report`: an all-reduce over dp x cp on the last stage, a broadcast over pp.

    Args:
        forward_data_store: what the schedule returned.
        plan: the weights, on a rank with data.
        run: what the schedule did.
        context: of the step.
        problem: what went wrong on this rank already, for all to hear of.
        over_pipeline: also tell earlier stages; they get None otherwise.

    Returns:
        Values and whether the step is empty; None where nothing is told.
    """
    shape = context.report_shape
    if context.groups.is_last_stage and problem is None:
        local = _local_report(forward_data_store, plan, run, context)
    else:
        local = LocalReport.empty(shape, problem)
    totals = reduce_report(local, shape, context.groups, over_pipeline=over_pipeline)
    return None if totals is None else _values(totals, context)


def count_evaluation(plan: StepWeights | None, groups: ParallelGroups) -> str | None:
    """Sum deferred counts that no gradient brings: an all-reduce over dp, a broadcast over tp.

    Every rank of the last stage calls it.

    Args:
        plan: the weights, on a rank with data.
        groups: the process groups.

    Returns:
        What went wrong, for all ranks to hear of; None: nothing.
    """
    try:
        sum_over_ranks(plan, groups)
    except LossAggError as error:
        return str(error)
    return None


def _local_report(
    forward_data_store: Sequence[Mapping[str, Tensor]],
    plan: StepWeights | None,
    run: SchedulePass,
    context: StepContext,
) -> LocalReport:
    try:
        counts = None if plan is None else StepCounts.pack(plan, context)
    except LossAggError as error:
        return LocalReport.empty(context.report_shape, str(error))
    return LocalReport.of(
        forward_data_store,
        context.report_shape,
        num_reports=context.num_microbatches if context.counts_loss_calls else None,
        counts=counts,
        tokens_seen=run.tokens_seen,
    )


def _values(totals: Totals, context: StepContext) -> StepReport:
    objective, names = context.objective, context.objective.names
    if totals.counts is None:
        known = StepCounts.not_needed(totals.tokens_seen, objective)
    else:
        known = StepCounts.unpack(totals.counts, objective)
    values = totals.values(names, known.value_factors, known.divisors)
    if names.extremes:
        extremes = extreme_values(objective.extremes, totals.extremes)
        values |= dict(zip(names.extremes, extremes, strict=True))
    return StepReport(values | known.named_counts(), known.trained_tokens == 0)


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
    def pack(cls, plan: StepWeights, context: StepContext) -> Tensor:
        """This tuple as float64 [`ReportShape.num_counts`]. Waits for the counts."""
        objective = context.objective
        by_mask = {key: plan.counts_of(key) for key in objective.mask_keys}
        counts = plan.counts
        one = torch.ones_like(counts.num_tokens, dtype=torch.float64)
        factors = [one]
        for term, coefficient in zip(objective.reported_terms, context.coefficients, strict=False):
            is_there = (coefficient != 0) | (by_mask[term.mask_key].num_tokens > 0)
            factors.append(torch.where(is_there, one, one * math.nan))
        trained = num_trained_tokens(objective, context.coefficients, by_mask)
        parts = [trained.double().to(one.device).view(1), torch.stack(factors)]
        divisors = plan.metric_divisors
        if divisors is not None:
            parts.append(divisors.to(one.device))
        if context.reports_counts:
            is_valid = objective.weightings[0].spec.sequence_count == "valid"
            num_seqs = counts.num_valid_seqs if is_valid else counts.num_seqs
            positions = plan.num_positions().to(one.device)
            parts.append(torch.stack([counts.num_tokens, num_seqs, positions]).double())
        return torch.cat(parts)

    @classmethod
    def unpack(cls, values: Sequence[float], objective: Objective) -> StepCounts:
        """From what `pack` gave on another rank."""
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


def num_trained_tokens(
    objective: Objective, coefficients: Sequence[float], by_mask: Mapping[str, GlobalCounts]
) -> Tensor:
    """The valid tokens under the masks of terms whose coefficient is not 0, int64 []."""
    masks = objective.masks_of_terms_that_train(coefficients)
    counted = [by_mask[key].num_tokens for key in masks]
    return torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.int64)
