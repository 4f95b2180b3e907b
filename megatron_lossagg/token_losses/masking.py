"""Masked positions are removed by selection, before and after a formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def select_valid(
    loss_mask: Any, inputs: Mapping[str, Any], constants: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """Which positions are valid, then every input with 0 at the others. Does not communicate.

    Args:
        loss_mask: [b, s] or [1, t]; non-zero marks a valid token.
        inputs: tensors of that shape, by the name that a message should use.
        constants: likewise, but detached.

    Returns:
        [valid (bool), *inputs, *constants], each in its own dtype, at least float32.

    Raises:
        TypeError: not tensors. ValueError: shapes that differ.
    """
    if not isinstance(loss_mask, Tensor):
        raise TypeError(f"loss_mask must be a tensor, got {type(loss_mask).__name__}.")
    constants = constants or {}
    valid = loss_mask != 0
    selected = [valid]
    for name, value in (*inputs.items(), *constants.items()):
        check_shape(name, value, loss_mask)
        value = value.detach() if name in constants else value
        dtype = torch.promote_types(value.dtype, torch.float32)
        selected.append(value.masked_fill(~valid, 0).to(dtype))
    return selected


def check_shape(name: str, value: Any, loss_mask: Tensor) -> None:
    """Raise unless `value` is a tensor of the mask's shape."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")
    if value.shape != loss_mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but loss_mask {tuple(loss_mask.shape)}; token "
            "losses take one value per token. Expand a value per sequence, for example "
            "advantages.unsqueeze(1).expand_as(loss_mask), and under context parallelism slice all "
            "fields together with slice_for_cp."
        )


def zero_where_masked(losses: Tensor, valid: Tensor) -> Tensor:
    """Exactly 0 at masked positions, with a gradient of exactly 0."""
    return losses.masked_fill(~valid, 0)


def check_option(name: str, value: Any, *, above: float, or_equal: bool = False) -> None:
    """Raise unless a number is above `above`, or equal to it where that is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not (value > above or (or_equal and value == above)):
        raise ValueError(f"{name} must be {'at least' if or_equal else 'above'} {above}: {value}.")
