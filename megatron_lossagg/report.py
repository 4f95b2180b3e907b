"""Reported values: numerators and denominators, summed first and divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import LossAggError, keys_or_type
from megatron_lossagg.groups import (
    ParallelGroups,
    all_reduce_sum,
    broadcast_from_first,
    broadcast_from_last,
    communication_device,
)


class MicrobatchReport(dict[str, Tensor]):
    """What `loss_func` reports of one microbatch: name -> [numerator, denominator], shape [2].

    The values are views of one tensor, and are what Megatron-LM's train_step sums. Minima and
    maxima are no quotients of sums: they are in `extremes` alone.

    Attributes:
        packed: all pairs, [num_sums, 2].
        extremes: maxima, and minima negated, [num_extremes]; None if none are reported.
    """

    def __init__(self, names: Sequence[str], packed: Tensor, extremes: Tensor | None) -> None:
        super().__init__(zip(names, packed.unbind(), strict=True))
        self.packed = packed
        self.extremes = extremes


@dataclass(frozen=True)
class Totals:
    """Reports of the global batch, on the host.

    Attributes:
        pairs: float64 [num_sums, 2]: numerators and denominators.
        extremes: float64 [num_extremes].
        facts: float64 [num_facts], the mean over the ranks that know them; NaN if none does.
        evidence: above zero if the global batch has a valid token.
    """

    pairs: Tensor
    extremes: Tensor
    facts: Tensor
    evidence: float


def reduce_reports(
    forward_data_store: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    groups: ParallelGroups,
    *,
    num_extremes: int = 0,
    num_reports: int | None = None,
    evidence_of_tokens: Tensor,
    facts: Tensor | None = None,
    num_facts: int = 0,
    broadcast_over_pipeline: bool = True,
) -> Totals | None:
    """Sum reports over microbatches and ranks: all-reduces over dp x cp, a broadcast over pp.

    One all-reduce of sums; with extremes one of maxima; with facts a broadcast over tp from the
    rank that knows them. All on the last stage.

    Args:
        forward_data_store: what the schedule returned: on the last stage one `MicrobatchReport` (or
            a dict with its pairs) per microbatch; empty elsewhere.
        names: the pairs, in the order of the result; the same on every rank.
        groups: the process groups.
        num_extremes: how many minima and maxima a report has.
        num_reports: how many the schedule must have returned on a last-stage rank: M. None: at
            least one.
        evidence_of_tokens: float64, shape [], above zero if this rank knows of a valid token; it
            travels along so that ranks without data learn whether the batch is empty.
        facts: float64 [num_facts], numbers that are equal on all ranks that know them; None where
            they are not known.
        num_facts: how many there are, on every rank.
        broadcast_over_pipeline: also give the other stages the numbers. Without it they get None.

    Raises:
        LossAggError: on every rank that gets numbers, if a last-stage rank brings no reports,
            another number of them or one that lacks an entry. Such a rank joins the collectives
            first, so that none waits for it.
    """
    device = torch.device("cpu")
    problem = None
    num_pairs = len(names)
    # numerators and denominators, facts, then: ranks that know the facts, evidence, problems
    totals = torch.zeros(2 * num_pairs + num_facts + 3, dtype=torch.float64)
    extremes = torch.full((num_extremes,), -float("inf"), dtype=torch.float64)
    if groups.is_last_stage:
        problem = _problem(forward_data_store, names, num_reports, num_extremes)
        if problem is None:
            pairs = torch.stack([_packed(entry, names) for entry in forward_data_store]).sum(dim=0)
            device = pairs.device
            tail = torch.zeros(num_facts + 3, dtype=torch.float64, device=device)
            if facts is not None:
                tail[:num_facts] = facts
                tail[num_facts] = 1
            tail[num_facts + 1] = evidence_of_tokens
            totals = torch.cat([pairs.reshape(-1), tail])
            if num_extremes:
                found = [entry.extremes.double() for entry in forward_data_store]  # type: ignore[attr-defined]
                extremes = torch.stack(found).max(dim=0).values
        else:
            totals[-1] = 1.0
        on = communication_device(groups.dp_cp, device)
        totals, extremes = totals.to(on), extremes.to(on)
        all_reduce_sum(totals, groups.dp_cp)
        if num_extremes and groups.dp_cp_size > 1:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=groups.dp_cp)
        if num_facts:
            known = totals[2 * num_pairs : 2 * num_pairs + num_facts + 1].clone()
            broadcast_from_first(known, groups.tp)
            totals[2 * num_pairs : 2 * num_pairs + num_facts + 1] = known
    everything = torch.cat([totals, extremes])
    if groups.pp_size > 1 and broadcast_over_pipeline:
        everything = everything.to(communication_device(groups.pp, device))
        broadcast_from_last(everything, groups.pp)
    elif not groups.is_last_stage:
        return None
    everything = everything.cpu()
    num_problems = int(everything[2 * num_pairs + num_facts + 2])
    if problem is not None:
        raise LossAggError(problem)
    if num_problems > 0:
        raise LossAggError(
            f"report() failed on {num_problems} last-stage rank(s), whose message says why; "
            "the sum over ranks would be wrong."
        )
    pairs, known, tail, extremes = everything.split([2 * num_pairs, num_facts, 3, num_extremes])
    return Totals(pairs.reshape(num_pairs, 2), extremes, known / tail[0], tail[1].item())


def _packed(entry: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """All pairs of a report; a host may have copied it into a plain dict."""
    if isinstance(entry, MicrobatchReport):
        return entry.packed.double()
    return torch.stack([entry[name].double() for name in names])


def _problem(
    forward_data_store: Any, names: Sequence[str], num_reports: int | None, num_extremes: int
) -> str | None:
    """What is wrong with the reports of a last-stage rank, or None. Looks at no value."""
    size = len(forward_data_store) if isinstance(forward_data_store, Sequence) else 0
    if size == 0 or (num_reports is not None and size != num_reports):
        wanted = "" if num_reports is None else f" {num_reports}"
        return (
            f"report() expects on a last-stage rank what the schedule returned: a list of{wanted} "
            f"dicts, one per microbatch; got a {type(forward_data_store).__name__} of {size}."
        )
    for entry in forward_data_store:
        pairs = [entry.get(name) if isinstance(entry, Mapping) else None for name in names]
        if not all(isinstance(pair, Tensor) and pair.shape == (2,) for pair in pairs):
            return (
                "report() expects the dicts that this step's loss_func returned, with [numerator, "
                f"denominator] under {', '.join(names)}; got an entry with {keys_or_type(entry)}."
            )
        extremes = getattr(entry, "extremes", None)
        if num_extremes and (extremes is None or len(extremes) != num_extremes):
            return (
                f"report() expects {num_extremes} minima and maxima in what this step's loss_func "
                "returned, and does not find them. Pass the schedule's forward_data_store itself: "
                "a copy into other dicts lacks them."
            )
    return None
