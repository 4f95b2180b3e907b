"""Reported values: numerators and denominators, summed first and divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError
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
    evidence_of_tokens: Tensor,
    broadcast_over_pipeline: bool = True,
) -> Tensor | None:
    """Sum reports over microbatches and ranks: an all-reduce over dp x cp, a broadcast over pp.

    Args:
        forward_data_store: what the schedule returned: on the last stage one dict per microbatch,
            each value a [2] tensor of numerator and denominator; empty elsewhere.
        names: the entries, in the order of the result; the same on every rank.
        groups: the process groups.
        evidence_of_tokens: float64, shape [], above zero if this rank knows of a valid token; it
            travels along so that ranks without data learn whether the batch is empty.
        broadcast_over_pipeline: also give the other stages the numbers. Without it they get None.

    Returns:
        float64 [len(names) + 1, 2]: numerators and denominators of the global batch; the last row
        is the summed evidence and 0.

    Raises:
        LossAggError: a last-stage rank brings no reports, or one lacks an entry.
    """
    device = torch.device("cpu")
    totals = torch.zeros(len(names) + 1, 2, dtype=torch.float64)
    if groups.is_last_stage:
        if not forward_data_store:
            raise LossAggError(
                "report() got an empty list on a last-stage rank; pass what the schedule returned "
                "there (one dict per microbatch)."
            )
        reports = torch.stack([_pairs(entry, names) for entry in forward_data_store]).sum(dim=0)
        device = reports.device
        evidence = evidence_of_tokens.to(device)
        totals = torch.cat([reports, torch.stack([evidence, torch.zeros_like(evidence)])[None]])
        totals = totals.to(communication_device(groups.dp_cp, device))
        all_reduce_sum(totals, groups.dp_cp)
    if groups.pp_size == 1:
        return totals
    if not broadcast_over_pipeline:
        return totals if groups.is_last_stage else None
    totals = totals.to(communication_device(groups.pp, device))
    broadcast_from_last(totals, groups.pp)
    return totals


def _pairs(entry: Any, names: Sequence[str]) -> Tensor:
    """One microbatch's [len(names), 2] of numerators and denominators in float64."""
    missing = [n for n in names if not isinstance(entry, Mapping) or n not in entry]
    if missing:
        raise LossAggError(
            f"A report of the schedule lacks {', '.join(missing)}; expected the dicts that this "
            "step's loss_func returned."
        )
    return torch.stack([entry[name].double() for name in names])
