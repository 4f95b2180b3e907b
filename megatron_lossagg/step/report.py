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
from megatron_lossagg.objective.objective import ValueNames
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


def reduce_reports(
    forward_data_store: Sequence[Mapping[str, Tensor]],
    names: ValueNames,
    groups: ParallelGroups,
    *,
    num_reports: int | None,
    counts: Tensor | None,
    num_counts: int,
    needs_counts: bool,
    tokens_seen: Tensor | None = None,
    problem: str | None = None,
    broadcast_over_pipeline: bool = True,
) -> Totals | None:
    """Sum reports over microbatches and ranks: all-reduces over dp x cp, a broadcast over pp.

    One all-reduce of sums, with minima and maxima one more; with `needs_counts` and tensor
    parallelism a broadcast over tp from the rank that knows the counts. All on the last stage.

    Args:
        forward_data_store: what the schedule returned: on the last stage one `MicrobatchReport` (or
            a dict with its pairs) per microbatch; empty elsewhere.
        names: of the report; the same on every rank.
        groups: the process groups.
        num_reports: how many the schedule must have returned on a last-stage rank: M. None: at
            least one.
        counts: float64 [num_counts], numbers that are equal on all ranks that know them; None where
            they are not known.
        num_counts: how many there are, on every rank.
        needs_counts: whether values depend on them; the same on every rank.
        tokens_seen: see `Totals`, float64 [], on a rank without counts.
        problem: what else is wrong on this rank.
        broadcast_over_pipeline: also give the other stages the numbers. Without it they get None.

    Raises:
        LossAggError: on every rank that gets numbers, if a last-stage rank brings no reports,
            another number of them, one that lacks an entry, or a problem. Such a rank joins the
            collectives first, so that none waits for it.
    """
    device = torch.device("cpu")
    num_sums = len(names.metric_sums)
    sizes = [2 * (len(names.values) + num_sums), num_sums, num_counts, 1, 1, 1]
    totals = torch.zeros(sum(sizes), dtype=torch.float64)
    extremes = torch.full((len(names.extremes),), -math.inf, dtype=torch.float64)
    if groups.is_last_stage:
        problem = problem or _problem(forward_data_store, names, num_reports)
        if problem is None:
            parts = [_summed(forward_data_store, names)]
            device = parts[0].device
            known = torch.zeros(num_counts + 3, dtype=torch.float64, device=device)
            if counts is not None:
                known[:num_counts] = counts
                known[num_counts] = 1
            elif tokens_seen is not None:
                known[num_counts + 1] = tokens_seen
            totals = torch.cat([*parts, known])
            if names.extremes:
                extremes = _largest(forward_data_store)
        else:
            totals[-1] = 1.0
        on = communication_device(groups.dp_cp, device)
        totals, extremes = totals.to(on), extremes.to(on)
        all_reduce_sum(totals, groups.dp_cp)
        if names.extremes:
            extremes = all_reduce_extremes(extremes, groups.dp_cp)
        if needs_counts:  # only tensor-parallel rank 0 is sure to have planned the step
            known = totals[-num_counts - 3 : -2].clone()
            broadcast_from_first(known, groups.tp)
            totals[-num_counts - 3 : -2] = known
    everything = torch.cat([totals, extremes])
    if groups.pp_size > 1 and broadcast_over_pipeline:
        everything = everything.to(communication_device(groups.pp, device))
        broadcast_from_last(everything, groups.pp)
    elif not groups.is_last_stage:
        return None
    pairs, metric_sums, known, num_known, seen, num_problems, largest = everything.cpu().split(
        [*sizes, len(names.extremes)]
    )
    if problem is not None:
        raise LossAggError(problem)
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
