"""Metrics: reported values without a gradient, summed over valid tokens and divided by a count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups, broadcast_from_first, communication_device
from megatron_lossagg.modes.spec import ModeSpec

EXTREMES = ("min", "max")


@dataclass(frozen=True)
class Metric:
    """A reported value that has no gradient.

    Attributes:
        name: its entry in the report.
        term: the term whose `loss_fn` returns it.
        normaliser: see `LossTerm`.
        spec: its term's, whose `sequence_count` says which sequences and units are counted.
        mask_key: the mask of its term.
    """

    name: str
    term: str
    normaliser: str
    spec: ModeSpec
    mask_key: str

    @property
    def kind(self) -> str:
        """How its partial values are put together: "sum", "min" or "max"."""
        return self.normaliser if self.is_extreme else "sum"

    @property
    def is_extreme(self) -> bool:
        """Whether it is a minimum or maximum, and no sum."""
        return self.normaliser in EXTREMES

    def divisor(self, counts: GlobalCounts) -> Tensor:
        """What its sum is divided by, float64 []: a count of the global batch, or 1.

        NaN over a batch without a valid token: a metric over nothing is no number.
        """
        inputs = self.spec.inputs(counts, counts.num_tokens.device)
        found = {
            "tokens": inputs.num_tokens,
            "sequences": inputs.num_seqs,
            "units": inputs.num_units,
            "sum": torch.ones_like(inputs.num_tokens),
        }[self.normaliser]
        assert found is not None  # units were counted, or given
        nan = torch.full_like(found, float("nan"))
        return torch.where(inputs.num_tokens > 0, found, nan)


def share_divisors(divisors: Tensor | None, num_metrics: int, groups: ParallelGroups) -> Tensor:
    """The divisors of tensor-parallel rank 0 on all of them: a broadcast over tp, without a sync.

    Args:
        divisors: float64 [num_metrics] on a rank that knows them; None on the others.
        num_metrics: how many there are, on every rank.
        groups: the process groups.

    Returns:
        float64 [num_metrics]; NaN where rank 0 does not know them.
    """
    if divisors is None:
        divisors = torch.full((num_metrics,), torch.nan, dtype=torch.float64)
    shared = divisors.to(communication_device(groups.tp, divisors.device), copy=True)
    broadcast_from_first(shared, groups.tp)
    return shared


def metric_divisors(
    metrics: tuple[Metric, ...], counts_of: Callable[[str], GlobalCounts]
) -> Tensor:
    """The divisors of some metrics, float64 [number of them]; `counts_of` takes a mask's key."""
    return torch.stack([metric.divisor(counts_of(metric.mask_key)) for metric in metrics])
