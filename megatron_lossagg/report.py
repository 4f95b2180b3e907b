"""Reported values: numerators and denominators, summed first and divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError, keys_or_type
from megatron_lossagg.groups import (
    ParallelGroups,
    all_reduce_sum,
    broadcast_from_last,
    communication_device,
)


def reduce_reports(
    forward_data_store: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    groups: ParallelGroups,
    *,
    num_reports: int | None = None,
    evidence_of_tokens: Tensor,
    broadcast_over_pipeline: bool = True,
) -> Tensor | None:
    """Sum reports over microbatches and ranks: an all-reduce over dp x cp, a broadcast over pp.

    Args:
        forward_data_store: what the schedule returned: on the last stage one dict per microbatch,
            each value a [2] tensor of numerator and denominator; empty elsewhere.
        names: the entries, in the order of the result; the same on every rank.
        groups: the process groups.
        num_reports: how many the schedule must have returned on a last-stage rank: M. None: at
            least one.
        evidence_of_tokens: float64, shape [], above zero if this rank knows of a valid token; it
            travels along so that ranks without data learn whether the batch is empty.
        broadcast_over_pipeline: also give the other stages the numbers. Without it they get None.

    Returns:
        float64 [len(names) + 1, 2]: numerators and denominators of the global batch; the last row
        is the summed evidence and the number of last-stage ranks whose reports were wrong, 0.

    Raises:
        LossAggError: on every rank that gets numbers, if a last-stage rank brings no reports,
            another number of them or one that lacks an entry. Such a rank joins the collectives
            first, so that none waits for it.
    """
    device = torch.device("cpu")
    problem = None
    totals = torch.zeros(len(names) + 1, 2, dtype=torch.float64)
    if groups.is_last_stage:
        problem = _problem(forward_data_store, names, num_reports)
        if problem is None:
            reports = torch.stack(
                [
                    torch.stack([entry[name].double() for name in names])
                    for entry in forward_data_store
                ]
            ).sum(dim=0)
            device = reports.device
            evidence = evidence_of_tokens.to(device)
            totals = torch.cat([reports, torch.stack([evidence, torch.zeros_like(evidence)])[None]])
        else:
            totals[-1, 1] = 1.0
        totals = totals.to(communication_device(groups.dp_cp, device))
        all_reduce_sum(totals, groups.dp_cp)
    if groups.pp_size > 1 and broadcast_over_pipeline:
        totals = totals.to(communication_device(groups.pp, device))
        broadcast_from_last(totals, groups.pp)
    elif not groups.is_last_stage:
        return None
    totals = totals.cpu()
    if problem is not None:
        raise LossAggError(problem)
    if totals[-1, 1] > 0:
        raise LossAggError(
            f"report() failed on {int(totals[-1, 1])} last-stage rank(s), whose message says why; "
            "the sum over ranks would be wrong."
        )
    return totals


def _problem(forward_data_store: Any, names: Sequence[str], num_reports: int | None) -> str | None:
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
    return None
