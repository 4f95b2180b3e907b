"""Reports of a run, completed by what no microbatch could know."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lossagg.groups import all_reduce_extremes, communication_device
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.microbatch_report import MicrobatchReport
from megatron_lossagg.step.report import extreme_values


def complete_reports(
    reports: Sequence[MicrobatchReport],
    num_tokens: float,
    context: StepContext,
) -> None:
    """Complete reports that a host sums up, in place: an all-reduce over dp x cp of extremes.

    Minima and maxima of the global batch, and the value 0 where there is no token. Every rank of
    the last stage calls it.

    Args:
        reports: of this rank's microbatches.
        num_tokens: n of the global batch, where pairs have it as denominators.
        context: of the step.
    """
    share = context.share
    if context.pairs_by_tokens and num_tokens == 0:
        for report in reports:
            report.divide_by_share(share)
    if not context.objective.extremes or not context.sees_weights:
        return
    found = [report.extremes.double() for report in reports if report.extremes is not None]
    largest = torch.full((len(context.objective.extremes),), -torch.inf, dtype=torch.float64)
    if found:
        largest = torch.stack(found).max(dim=0).values
    largest = largest.to(communication_device(context.groups.dp_cp, largest.device))
    largest = all_reduce_extremes(largest, context.groups.dp_cp)
    values = extreme_values(context.objective.extremes, largest.tolist())
    for report in reports:
        report.set_extremes(values, share)
