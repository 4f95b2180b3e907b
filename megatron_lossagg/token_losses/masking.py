"""Masked positions are removed by selection, before and after a formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.plain_tensors import check_plain_tensor
from megatron_lossagg.weighted_sum import where_nonzero


def select_valid(
    loss_mask: Any, inputs: Mapping[str, Any], constants: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """The mask as numbers, then every input with 0 where it is 0. Does not communicate.

    Args:
        loss_mask: [b, s] or [1, t]; non-zero marks a valid token.
        inputs: tensors of that shape, by the name that a message should use.
        constants: likewise, but detached.

    Returns:
        [mask, *inputs, *constants], inputs in their own dtype, at least float32; the mask not 0 at
        valid tokens, in the dtype of the first input.

    Raises:
        TypeError: not tensors. ValueError: shapes that differ.
    """
    check_plain_tensor(loss_mask, "loss_mask", "[b, s]")
    constants = constants or {}
    mask = loss_mask.detach()
    masks: dict[torch.dtype, Tensor] = {}
    selected = []
    for name, value in (*inputs.items(), *constants.items()):
        check_shape(name, value, loss_mask)
        dtype = torch.promote_types(value.dtype, torch.float32)
        if dtype not in masks:
            masks[dtype] = _mask_in(dtype, mask)
        value = value.detach() if name in constants else value
        selected.append(where_nonzero(value.to(dtype), masks[dtype]))
    return [next(iter(masks.values())), *selected]


def _mask_in(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """Not 0 exactly where `mask` is not, also where that is too small for the dtype."""
    if mask.is_floating_point() and mask.dtype != dtype:
        mask = mask != 0
    return mask.to(dtype)


def check_shape(name: str, value: Any, loss_mask: Tensor) -> None:
    """Raise unless `value` is a tensor of the mask's shape."""
    check_plain_tensor(value, name, "[b, s]")
    if value.shape != loss_mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but loss_mask {tuple(loss_mask.shape)}; token "
            "losses take one value per token. Expand a value per sequence, for example "
            "advantages.unsqueeze(1).expand_as(loss_mask), and under context parallelism slice all "
            "fields together with slice_for_cp."
        )


def zero_where_masked(losses: Tensor, mask: Tensor) -> Tensor:
    """Exactly 0 where `mask` is 0, with a gradient of exactly 0."""
    return where_nonzero(losses, _mask_in(losses.dtype, mask))


def check_option(name: str, value: Any, *, above: float, or_equal: bool = False) -> None:
    """Raise unless a number is above `above`, or equal to it where that is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not (value > above or (or_equal and value == above)):
        raise ValueError(f"{name} must be {'at least' if or_equal else 'above'} {above}: {value}.")
