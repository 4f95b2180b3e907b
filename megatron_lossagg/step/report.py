"""Reported values of a step: summed over microbatches and ranks first, divided once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError, keys_or_type
from megatron_lossagg.groups import (
    ParallelGroups,
    all_reduce_extremes,
    all_reduce_sum,
    broadcast_from_first,
    broadcast_from_last,
    communication_device,
)
from megatron_lossagg.objective.objective import Objective, ValueNames
from megatron_lossagg.weights.metrics import Metric


@dataclass(frozen=True)
class Totals:
    """Reports of the global batch, on the host.

    Attributes:
        pairs: numerators and denominators of the loss, its terms and metric sums.
        metric_sums: over the valid tokens of the global batch, not divided; NaN where a host has
            copied reports into plain dicts, which hold pairs alone.
        extremes: maxima, and minima negated.
        counts: what the ranks that know the counts of the step brought; None if none does.
        tokens_seen: what the others brought, above 0 if they saw a valid token of a term that
            trains.
    """

    pairs: list[list[float]]
    metric_sums: list[float]
    extremes: list[float]
    counts: list[float] | None
    tokens_seen: float

    def values(
        self, names: ValueNames, value_factors: Sequence[float], divisors: Sequence[float]
    ) -> dict[str, float]:
        """The loss, terms and metrics that are sums, by name: sums first, divided once."""
        found = {}
        num_values = len(names.values)
        for name, (numerator, denominator), factor in zip(
            names.values, self.pairs[:num_values], value_factors, strict=True
        ):
            # A batch without a valid token has denominator 0 where n is that, and nothing divides.
            found[name] = (numerator / denominator if denominator else numerator) * factor
        for name, total, (numerator, denominator), divisor in zip(
            names.metric_sums, self.metric_sums, self.pairs[num_values:], divisors, strict=True
        ):
            if math.isnan(total) and denominator:
                found[name] = numerator / denominator
            else:
                found[name] = total / divisor if divisor else math.nan
        return found


@dataclass(frozen=True)
class ReportShape:
    """What is reduced for a report; the same on every rank.

    Attributes:
        names: the entries.
        num_counts: how many numbers the counts of the step are, see `StepCounts`.
        needs_counts: whether values depend on them: metrics do, and terms that only report.
        sizes: of what is summed: pairs, metric sums, counts, ranks with counts, tokens, problems.
    """

    names: ValueNames
    num_counts: int
    needs_counts: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, objective: Objective, *, reports_counts: bool) -> ReportShape:
        """Of the reports of an objective, with the counts of the step or without."""
        names = objective.names
        num_values, num_sums = len(names.values), len(names.metric_sums)
        num_counts = 1 + num_values + num_sums + (3 if reports_counts else 0)
        may_only_report = any(
            callable(term.coefficient) or term.coefficient == 0 for term in objective.reported_terms
        )
        return cls(
            names,
            num_counts,
            needs_counts=reports_counts or num_sums > 0 or may_only_report,
            sizes=(2 * (num_values + num_sums), num_sums, num_counts, 1, 1, 1),
        )


@dataclass(frozen=True)
class LocalReport:
    """What one last-stage rank brings to a report, on the device of its values.

    Attributes:
        sums: the numbers of `ReportShape.sizes`, float64, to be summed over dp x cp.
        extremes: maxima, and minima negated, float64 [num_extremes].
        problem: what is wrong on this rank, which then brings nothing else.
    """

    sums: Tensor
    extremes: Tensor
    problem: str | None = None

    @classmethod
    def empty(cls, shape: ReportShape, problem: str | None = None) -> LocalReport:
        """Of a rank that has nothing to say, or nothing but a problem."""
        sums = torch.zeros(sum(shape.sizes), dtype=torch.float64)
        sums[-1] = float(problem is not None)
        extremes = torch.full((len(shape.names.extremes),), -math.inf, dtype=torch.float64)
        return cls(sums, extremes, problem)

    @classmethod
    def of(
        cls,
        forward_data_store: Sequence[Mapping[str, Tensor]],
        shape: ReportShape,
        *,
        num_reports: int | None,
        counts: Tensor | None,
        tokens_seen: Tensor | None,
    ) -> LocalReport:
        """Sum reports over microbatches. Does not communicate.

        Args:
            forward_data_store: what the schedule returned: one `MicrobatchReport` (or a dict with
                its pairs) per microbatch.
            shape: of the report.
            num_reports: how many the schedule must have returned: M. None: at least one.
            counts: float64 [num_counts], equal on all ranks that know them; None on the others.
            tokens_seen: on these, float64 [], see `Totals`.

        Returns:
            What this rank brings: its sums, or its problem.
        """
        problem = _problem(forward_data_store, shape.names, num_reports)
        if problem is not None:
            return cls.empty(shape, problem)
        summed = _summed(forward_data_store, shape.names)
        known = torch.zeros(shape.num_counts + 3, dtype=torch.float64, device=summed.device)
        if counts is not None:
            known[: shape.num_counts] = counts
            known[shape.num_counts] = 1
        elif tokens_seen is not None:
            known[shape.num_counts + 1] = tokens_seen
        extremes = summed.new_empty(0)
        if shape.names.extremes:
            extremes = _largest(forward_data_store)
        return cls(torch.cat([summed, known]), extremes)


def reduce_report(
    local: LocalReport, shape: ReportShape, groups: ParallelGroups, *, over_pipeline: bool
) -> Totals | None:
    """Sum reports over ranks: all-reduces over dp x cp, a broadcast over pp.

    One all-reduce of sums, with minima and maxima one more; where values depend on counts and there
    is tensor parallelism a broadcast over tp from the rank that knows them. All on the last stage.

    Args:
        local: what this rank brings; empty on other stages.
        shape: of the report.
        groups: the process groups.
        over_pipeline: also give the other stages the numbers. Without it they get None.

    Returns:
        The numbers of the global batch; None on earlier stages without `over_pipeline`.

    Raises:
        LossAggError: on every rank that gets numbers, if a last-stage rank has a problem. Such a
            rank joins the collectives first, so that none waits for it.
    """
    sums, extremes, device = local.sums, local.extremes, local.sums.device
    if groups.is_last_stage:
        on = communication_device(groups.dp_cp, device)
        sums, extremes = sums.to(on), extremes.to(on)
        all_reduce_sum(sums, groups.dp_cp)
        if shape.names.extremes:
            extremes = all_reduce_extremes(extremes, groups.dp_cp)
        if shape.needs_counts:  # only tensor-parallel rank 0 is sure to have planned the step
            place = slice(-shape.num_counts - 3, -2)
            known = sums[place].clone()
            broadcast_from_first(known, groups.tp)
            sums[place] = known
    everything = torch.cat([sums, extremes])
    if groups.pp_size > 1 and over_pipeline:
        everything = everything.to(communication_device(groups.pp, device))
        broadcast_from_last(everything, groups.pp)
    elif not groups.is_last_stage:
        return None
    pairs, metric_sums, known, num_known, seen, num_problems, largest = everything.cpu().split(
        [*shape.sizes, len(shape.names.extremes)]
    )
    if local.problem is not None:
        raise LossAggError(local.problem)
    if num_problems.item() > 0:
        raise LossAggError(
            f"report() failed on {int(num_problems)} last-stage rank(s), whose message says why; "
            "the sum over ranks would be wrong."
        )
    return Totals(
        pairs.reshape(-1, 2).tolist(),
        metric_sums.tolist(),
        largest.tolist(),
        (known / num_known).tolist() if num_known.item() else None,
        seen.item(),
    )


def extreme_values(metrics: Sequence[Metric], largest: Sequence[float]) -> list[float]:
    """Minima and maxima from maxima (minima negated); NaN over no valid token, or of a NaN."""
    return [
        math.nan if value == -math.inf else value if metric.kind == "max" else -value
        for metric, value in zip(metrics, largest, strict=True)
    ]


def _summed(entries: Sequence[Mapping[str, Tensor]], names: ValueNames) -> Tensor:
    """Pairs of values and metric sums, then metric sums, over microbatches: float64."""
    all_names = (*names.values, *names.metric_sums)
    pairs = [torch.stack([entry[name].double() for name in all_names]) for entry in entries]
    total = torch.stack(pairs).sum(dim=0).reshape(-1)
    if not names.metric_sums:
        return total
    unknown = torch.full((len(names.metric_sums),), math.nan, dtype=torch.float64)
    sums = [getattr(entry, "metric_sums", unknown).to(total.device) for entry in entries]
    return torch.cat([total, torch.stack(sums).sum(dim=0)])


def _largest(entries: Sequence[Mapping[str, Tensor]]) -> Tensor:
    found = [entry.extremes.double() for entry in entries]  # type: ignore[attr-defined]
    return torch.stack(found).max(dim=0).values


def _problem(entries: Any, names: ValueNames, num_reports: int | None) -> str | None:
    """What is wrong with the reports of a last-stage rank, or None. Looks at no value."""
    size = len(entries) if isinstance(entries, Sequence) else 0
    if size == 0 or (num_reports is not None and size != num_reports):
        wanted = "" if num_reports is None else f" {num_reports}"
        return (
            f"report() expects on a last-stage rank what the schedule returned: a list of{wanted} "
            f"dicts, one per microbatch; got a {type(entries).__name__} of {size}."
        )
    for entry in entries:
        all_names = (*names.values, *names.metric_sums)
        pairs = [entry.get(name) if isinstance(entry, Mapping) else None for name in all_names]
        if not all(isinstance(pair, Tensor) and pair.shape == (2,) for pair in pairs):
            return (
                "report() expects the dicts that this step's loss_func returned, with [numerator, "
                f"denominator] under {', '.join(all_names)}; got an entry with "
                f"{keys_or_type(entry)}."
            )
        extremes = getattr(entry, "extremes", None)
        num_extremes = len(names.extremes)
        if num_extremes and (extremes is None or len(extremes) != num_extremes):
            return (
                f"report() expects {num_extremes} minima and maxima in what this step's loss_func "
                "returned, and does not find them. Pass the schedule's forward_data_store itself: "
                "a copy into other dicts lacks them."
            )
    return None
