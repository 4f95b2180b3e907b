"""Metrics: reported values without a gradient, summed over valid tokens and divided by a count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.modes import ModeSpec

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


def metric_divisors(
    metrics: tuple[Metric, ...], counts_of: Callable[[str], GlobalCounts]
) -> Tensor:
    """The divisors of some metrics, float64 [number of them]; `counts_of` takes a mask's key."""
    return torch.stack([metric.divisor(counts_of(metric.mask_key)) for metric in metrics])


def sum_of_metric(values: Tensor, is_valid: Tensor) -> Tensor:
    """The sum over valid tokens (or sequences), float64 []. Neither communicates nor syncs.

    In float64, whatever the weights are: a fraction that is 1 everywhere is a sum of ones, and
    moments of numbers far from 0 keep their digits.

    Args:
        values: [b, s], or [b] with a value per sequence.
        is_valid: bool [b, s].
    """
    is_valid = _as_values(is_valid, values)
    return torch.where(is_valid, values, torch.zeros_like(values)).sum(dtype=torch.float64)


def extreme_of_metric(values: Tensor, is_valid: Tensor, normaliser: str) -> Tensor:
    """The largest value at a valid token, or minus the smallest; -inf if there is none."""
    if not values.is_floating_point():
        values = values.double()
    signed = values if normaliser == "max" else -values
    lowest = torch.full((), -float("inf"), dtype=signed.dtype, device=signed.device)
    if signed.numel() == 0:
        return lowest
    return torch.where(_as_values(is_valid, values), signed, lowest).max()


def _as_values(is_valid: Tensor, values: Tensor) -> Tensor:
    """For values per sequence: which rows have a valid token."""
    return is_valid.any(dim=1) if values.dim() == 1 else is_valid


def check_metric(
    values: Any,
    weights: Tensor,
    name: str,
    normaliser: str,
    *,
    rows_are_sequences: bool,
    is_packed: bool,
) -> None:
    """Raise unless `values` holds one number per token, or per sequence. Looks at no value.

    Args:
        values: what `loss_fn` returned.
        weights: [b, s], the weights of its term.
        name: of the metric.
        normaliser: of the metric.
        rows_are_sequences: whether a row of this rank is not sliced over context-parallel ranks.
        is_packed: whether it holds several sequences.
    """
    if not isinstance(values, Tensor):
        raise TypeError(
            f"loss_fn returned a {type(values).__name__} as metric {name!r}: return a tensor of "
            f"one value per token, {tuple(weights.shape)}, not reduced."
        )
    if values.is_complex():
        raise TypeError(f"metric {name!r} holds {values.dtype}: return real numbers or bools.")
    if values.shape == weights.shape:
        return
    if is_packed:
        raise ValueError(
            f"metric {name!r} has shape {tuple(values.shape)}, but its term's mask has "
            f"{tuple(weights.shape)}. In packed data (cu_seqlens) return one value per token: of a "
            "value per sequence, that over the number of its valid tokens, declared as 'sequences'."
        )
    if values.shape != weights.shape[:1]:
        raise ValueError(
            f"metric {name!r} has shape {tuple(values.shape)}, but its term's mask has "
            f"{tuple(weights.shape)}: return one value per token, or one per sequence, "
            f"[{weights.shape[0]}]; leave sums and means to the plugin."
        )
    if normaliser == "tokens":
        raise ValueError(
            f"metric {name!r} has one value per sequence, {tuple(values.shape)}, but is declared "
            "as 'tokens', a mean over tokens. Declare it as 'sequences', or return [b, s]."
        )
    if not rows_are_sequences and normaliser not in EXTREMES:
        raise LossAggError(
            f"metric {name!r} has one value per row, {tuple(values.shape)}, but a row of this rank "
            "is no whole sequence (it is sliced over context-parallel ranks), so it would be "
            "counted on several ranks. Return it per token, as its value over the number of valid "
            "tokens of the sequence, declared as 'sequences'."
        )
