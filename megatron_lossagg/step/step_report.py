"""The report of a step: its values and counts, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.report import LocalReport, ReportShape, Totals, reduce_report
from megatron_lossagg.step.schedule_pass import SchedulePass
from megatron_lossagg.step.step_counts import (
    StepCounts,
    needs_step_counts,
    num_step_counts,
    pack_step_counts,
)
from megatron_lossagg.weights.step_weights import StepWeights


class StepReport(NamedTuple):
    """Attributes: `values` by name; `is_empty`: no term that trains has a valid token."""

    values: dict[str, float]
    is_empty: bool


def step_report(
    forward_data_store: Sequence[Mapping[str, Tensor]],
    plan: StepWeights | None,
    run: SchedulePass,
    context: StepContext,
    *,
    num_microbatches: int,
    problem: str | None,
    over_pipeline: bool,
) -> StepReport | None:
    """`Step.report`: an all-reduce over dp x cp on the last stage, a broadcast over pp.

    Args:
        forward_data_store: what the schedule returned.
        plan: the weights, on a rank with data.
        run: what the schedule did.
        context: of the step.
        num_microbatches: M.
        problem: what went wrong on this rank already, for all to hear of.
        over_pipeline: also tell earlier stages; they get None otherwise.
    """
    objective, tells_counts = context.objective, context.reports_counts
    shape = ReportShape(
        objective.names,
        num_counts=num_step_counts(objective, reports_counts=tells_counts),
        needs_counts=needs_step_counts(objective, reports_counts=tells_counts),
    )
    local = LocalReport.empty(shape, problem)
    if context.groups.is_last_stage and problem is None:
        try:
            local = LocalReport.of(
                forward_data_store,
                shape,
                num_reports=num_microbatches if context.counts_loss_calls else None,
                counts=_packed_counts(plan, context),
                tokens_seen=run.tokens_seen,
            )
        except LossAggError as error:
            local = LocalReport.empty(shape, str(error))
    totals = reduce_report(local, shape, context.groups, over_pipeline=over_pipeline)
    return None if totals is None else _values(totals, context)


def _packed_counts(plan: StepWeights | None, context: StepContext) -> Tensor | None:
    if plan is None:
        return None
    coefficients, tells_counts = context.coefficients, context.reports_counts
    return pack_step_counts(plan, context.objective, coefficients, reports_counts=tells_counts)


def _values(totals: Totals, context: StepContext) -> StepReport:
    objective, names = context.objective, context.objective.names
    if totals.counts is None:
        known = StepCounts.not_needed(totals.tokens_seen, objective)
    else:
        known = StepCounts.unpack(totals.counts, objective)
    values = totals.values(names, known.value_factors, known.divisors)
    values |= dict(zip(names.extremes, objective.extreme_values(totals.extremes), strict=True))
    return StepReport(values | known.named_counts(), known.trained_tokens == 0)
