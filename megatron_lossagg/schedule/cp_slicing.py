"""A microbatch's part for this context-parallel rank, by Megatron's own slicer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.sequences import checked_cu_seqlens
from megatron_lossagg.errors import keys_or_type
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.plain_tensors import check_plain_tensor, dict_hint


def slice_for_cp(
    microbatch: Mapping[str, Any], groups: ParallelGroups | None = None
) -> dict[str, Any]:
    """This context-parallel rank's part of a microbatch. Does not communicate.

    Calls Megatron-Core's `get_batch_on_this_cp_rank` on a copy: with C ranks a row of width s is
    cut into 2C chunks and rank r keeps chunks r and 2C-1-r. Fields are sliced that have the row
    width in dimension 1 (`attention_mask`: dimension 2), so weights, mask and labels stay aligned;
    others, such as [b] fields, are kept as they are. A packed row [1, t] with
    `cu_seqlens` is cut sequence by sequence, at the lengths of `cu_seqlens_padded` if that is
    there; both stay whole.

    Args:
        microbatch: tensors [b, s, ...]; the row width is that of "loss_mask", "tokens" or "labels".
        groups: None reads Megatron's parallel state.

    Returns:
        A new dict; the argument is not changed.

    Raises:
        TypeError: no dict, or a nested tensor.
        ValueError: the width is not a multiple of 2C, or no field tells it, or fields differ.
    """
    if not isinstance(microbatch, Mapping):
        raise TypeError(
            f"slice_for_cp expects a dict of tensors, got {type(microbatch).__name__}."
            f"{dict_hint(microbatch)}"
        )
    groups = ParallelGroups.from_megatron() if groups is None else groups
    sliced = dict(microbatch)
    if groups.cp_size == 1:
        return sliced
    for key, value in microbatch.items():
        if isinstance(value, Tensor):
            check_plain_tensor(value, key, "[b, s]")
    width = _row_width(microbatch)
    if microbatch.get("cu_seqlens") is not None:
        index = _packed_positions(microbatch, width, groups)
        for key, value in microbatch.items():
            if _has_width(key, value, width):
                sliced[key] = value.index_select(1, index)
        return sliced
    if width % (2 * groups.cp_size) != 0:
        raise ValueError(
            f"Rows of width {width} cannot be split over {groups.cp_size} context-parallel ranks: "
            f"the width must be a multiple of {2 * groups.cp_size}. Pad the rows (mask 0)."
        )
    to_slice = {
        key: value.contiguous()  # the slicer takes views
        for key, value in microbatch.items()
        if _has_width(key, value, width)
    }
    sliced.update(_megatron_slice(to_slice, groups.cp))
    return sliced


def _packed_positions(microbatch: Mapping[str, Any], width: int, groups: ParallelGroups) -> Tensor:
    """The positions of packed tokens that this rank keeps, in order: int64 [t / C].

    Each sequence, at its padded length, is cut as a row is; what Transformer Engine's
    `thd_get_partitioned_indices` gives, without needing Transformer Engine. No host sync on a GPU.

    Raises:
        ValueError: a sequence whose padded length cannot be cut in 2C pieces.
    """
    mask = next(v for k, v in microbatch.items() if _has_width(k, v, width))
    name = "cu_seqlens" if microbatch.get("cu_seqlens_padded") is None else "cu_seqlens_padded"
    starts = checked_cu_seqlens(microbatch[name], name, mask)
    pieces = 2 * groups.cp_size
    if mask.device.type == "cpu":
        lengths = starts.diff().tolist()
        if starts[-1].item() != width or any(length % pieces for length in lengths):
            raise ValueError(
                f"{name} describes sequences of lengths {lengths[:8]} in a row of {width} tokens; "
                f"over {groups.cp_size} context-parallel ranks every padded length must be a "
                f"multiple of {pieces}, and together they must fill the row. Pad each sequence."
            )
    local_starts = starts // groups.cp_size
    local = torch.arange(width // groups.cp_size, device=mask.device)
    sequence = torch.searchsorted(local_starts[1:].contiguous(), local, right=True)
    sequence = sequence.clamp(max=starts.numel() - 2)
    piece = (starts.diff() // pieces)[sequence]
    within = local - local_starts[sequence]
    first, last = groups.cp_rank, pieces - 1 - groups.cp_rank
    offset = torch.where(within < piece, first * piece, (last - 1) * piece) + within
    return starts[sequence] + offset


def _row_width(microbatch: Mapping[str, Any]) -> int:
    widths = {}
    for key in ("loss_mask", "tokens", "labels", "position_ids"):
        value = microbatch.get(key)
        if isinstance(value, Tensor) and value.dim() >= 2:
            widths[key] = value.shape[1]
    if not widths:
        raise ValueError(
            "slice_for_cp cannot tell the row width: expected 'loss_mask', 'tokens' or 'labels' of "
            f"shape [b, s]; the microbatch has {keys_or_type(microbatch)}."
        )
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"slice_for_cp needs rows of one width, got {widths}: what is cut must stay aligned. "
            "Trim or pad the fields to one width."
        )
    return next(iter(widths.values()))


def _has_width(key: str, value: Any, width: int) -> bool:
    if key in ("cu_seqlens", "cu_seqlens_padded"):
        return False  # [1, n + 1], whatever n is
    dim = 2 if key == "attention_mask" else 1
    return isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == width


def _megatron_slice(fields: dict[str, Tensor], cp_group: Any) -> dict[str, Any]:
    """Megatron's slicer on a dict it may change; its parameters grew over the releases."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    parameters = inspect.signature(get_batch_on_this_cp_rank).parameters
    options: dict[str, Any] = {}
    if "cp_group" in parameters:
        options["cp_group"] = cp_group
    if "is_hybrid_cp" in parameters:
        options["is_hybrid_cp"] = False
    return get_batch_on_this_cp_rank(fields, **options)
