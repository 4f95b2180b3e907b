"""Reading masks: how many tokens of each row count, and whether a value is neither 0 nor 1.

Masks of one width are read together: a call per mask would cost more than the reading.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.plain_tensors import check_plain_tensor

# Values read together: few enough to stay in a cache between passes, many for the calls they need.
_MAX_VALUES = 2**20
# Masks of fewer values are put together first: two calls per mask would cost more.
_MIN_VALUES = 2**12
# A sum of ones in float32 is exact up to here.
_MAX_WIDTH_IN_FLOAT32 = 2**24
# On the CPU the buffer of `_MAX_VALUES` is kept: a fresh one may cost more than what is done to it.
_KEPT = threading.local()


def checked_mask(loss_mask: Any) -> Tensor:
    """The mask outside of any graph; raises unless it is a tensor [b, s]. Looks at no value."""
    check_plain_tensor(loss_mask, "loss_mask", "[b, s]")
    if loss_mask.dim() != 2:
        raise ValueError(
            "loss_mask must have shape [b, s], one sequence per row, or [1, t] with cu_seqlens; "
            f"got {tuple(loss_mask.shape)}."
        )
    return loss_mask.detach() if loss_mask.requires_grad else loss_mask


def count_rows(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor | int]:
    """How many values of each row are 1, and how many of all values are neither 0 nor 1.

    Args:
        masks: [b, s] each, of any dtype and shape; on one device.

    Returns:
        (int64 [number of rows of all masks], int64 []: 0 on the CPU, where such a mask raises.)
    """
    num_tokens: list[Tensor] = []
    num_bad: Tensor | int = 0
    for together in _of_one_width(masks):
        if together[0].dtype == torch.int64 and together[0].device.type == "cpu":
            num_tokens.append(_count_int64(together))
        else:
            of_rows, bad = _count_as_floats(together)
            num_tokens.append(of_rows)
            num_bad = num_bad + bad
    return torch.cat(num_tokens).long(), num_bad


def _count_as_floats(masks: list[Tensor]) -> tuple[Tensor, Tensor | int]:
    """As `count_rows`, of masks of one width and dtype; counts are floats that hold integers."""
    values = _copied_as_floats(masks)
    is_wide = values.shape[1] > _MAX_WIDTH_IN_FLOAT32
    num_tokens = values.sum(dim=1, dtype=torch.float64 if is_wide else None)
    if masks[0].dtype == torch.bool:
        return num_tokens, 0
    # x - x^2 is 0 for 0 and 1 alone. Written over the copy, which has been summed.
    deviation = values.addcmul_(values, values, value=-1)
    if deviation.device.type != "cpu":
        return num_tokens, (deviation != 0).sum()
    if deviation.numel() > 0 and any(float(end) != 0 for end in deviation.aminmax()):
        _raise_bad_values(masks)
    return num_tokens, 0


def _count_int64(masks: list[Tensor]) -> Tensor:
    """The valid tokens of each row, int64, of masks of one width on the CPU. Copies nothing.

    An integer is 0 or 1 if it lies between them. Extremes are found in two thirds of the time when
    each mask is read as twice as many int32, whose lower and upper words are then 0 and 1, and what
    that lets pass, an upper word of 1, adds 2^32 to the count of its row.
    """
    if masks[0].numel() < _MIN_VALUES:
        masks = [torch.cat(masks)]
    num_tokens: list[Tensor] = []
    extremes: list[Tensor] = []
    for mask in masks:
        num_tokens.append(mask.sum(dim=1))
        if mask.numel() > 0:  # at once, as the mask is in the cache now
            words = mask.view(torch.int32) if mask.stride(1) == 1 else mask
            extremes += words.aminmax()
    of_rows = torch.cat(num_tokens)
    if extremes:
        low, high = torch.stack(extremes).aminmax()
        if int(low) < 0 or int(high) > 1 or int(of_rows.max()) > masks[0].shape[1]:
            _raise_bad_values(masks)
    return of_rows


def as_numbers(mask: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask as 0 and 1 of a dtype on a device, without waiting; the mask itself if it is that."""
    return _as_bytes(mask).to(device, dtype, non_blocking=True)


def _as_bytes(mask: Tensor) -> Tensor:
    """A bool mask as bytes, whose conversion is several times as fast on the CPU."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _copied_as_floats(masks: list[Tensor]) -> Tensor:
    """The rows of all masks in at least float32, in which no other value becomes a 0 or 1."""
    dtype, device = torch.promote_types(masks[0].dtype, torch.float32), masks[0].device
    shape = (sum(mask.shape[0] for mask in masks), masks[0].shape[1])
    copy = _buffer(shape, dtype, device)
    if masks[0].dtype == dtype:
        return torch.cat(masks, out=copy)
    if device.type != "cpu" or masks[0].numel() < _MIN_VALUES:
        return copy.copy_(_as_bytes(torch.cat(masks)))
    for part, mask in zip(copy.split([mask.shape[0] for mask in masks]), masks, strict=True):
        part.copy_(_as_bytes(mask))
    return copy


def _buffer(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    size = shape[0] * shape[1]
    if device.type != "cpu" or size > _MAX_VALUES:
        return torch.empty(shape, dtype=dtype, device=device)
    kept = _KEPT.__dict__.get(str(dtype))
    if kept is None:
        with torch.inference_mode(False):  # one made in that mode could not be used outside of it
            kept = torch.empty(_MAX_VALUES, dtype=dtype)
        setattr(_KEPT, str(dtype), kept)
    return kept[:size].view(shape)


def _of_one_width(masks: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of the same width and dtype, up to `_MAX_VALUES` values at a time."""
    together: list[Tensor] = []
    kind, num_values = None, 0
    for mask in masks:
        own_kind = (mask.shape[1], mask.dtype)
        num_values += mask.numel()
        if together and (own_kind != kind or num_values > _MAX_VALUES):
            yield together
            together, num_values = [], mask.numel()
        together.append(mask)
        kind = own_kind
    yield together


def _raise_bad_values(masks: Sequence[Tensor]) -> None:
    for mask in masks:
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel() > 0:
            raise ValueError(
                f"loss_mask may hold only 0 and 1, got {wrong.numel()} other values such as "
                f"{wrong[0].item()}. Put per-token weights into the loss, not into the mask: the "
                "mask is what is counted."
            )
