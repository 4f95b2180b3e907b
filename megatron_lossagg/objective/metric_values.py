"""What the values of a metric come to over the valid tokens of a microbatch, by its kind."""

from __future__ import annotations

import torch
from torch import Tensor


def partial_value(values: Tensor, is_valid: Tensor, kind: str) -> Tensor:
    """Sum, maximum or minus the minimum over valid tokens, []. Neither communicates nor syncs.

    A minimum is negated, so that the largest of several is what minima and maxima both come to.

    Args:
        values: numbers or bools, [b, s], or [b] with a value per sequence.
        is_valid: bool [b, s].
        kind: "sum", "min" or "max".

    Returns:
        The number, [], float64 for a sum.
    """
    if values.dim() == 1:  # of rows that have a valid token
        is_valid = is_valid.any(dim=1)
    return _sum(values, is_valid) if kind == "sum" else _extreme(values, is_valid, kind)


def _sum(values: Tensor, is_valid: Tensor) -> Tensor:
    """In float64, whatever the weights are.

    A fraction that is 1 everywhere is a sum of ones, and moments of numbers far from 0 keep their
    digits.
    """
    return torch.where(is_valid, values, torch.zeros_like(values)).sum(dtype=torch.float64)


def _extreme(values: Tensor, is_valid: Tensor, kind: str) -> Tensor:
    """In the dtype of the values, at least a floating one; -inf over no valid token."""
    if not values.is_floating_point():
        values = values.double()
    signed = values if kind == "max" else -values
    lowest = torch.full((), -float("inf"), dtype=signed.dtype, device=signed.device)
    if signed.numel() == 0:
        return lowest
    return torch.where(is_valid, signed, lowest).max()
