"""Which tokens of a microbatch count, and to which sequence each belongs: padded or packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequences of one microbatch, with n of them.

    Attributes:
        valid: bool, the mask's shape [b, s].
        num_tokens: n_s, the valid tokens of each sequence, int64 [n].
        num_seqs: sequences that are there, valid or not, int64 [].
        sequence_of_token: int64 [b, s], in 0..n-1; None where row r is sequence r.
        num_bad_values: mask values that are neither 0 nor 1, or that are 1 outside every sequence,
            int64 []; 0 on the CPU, where such a mask has raised.
    """

    valid: Tensor
    num_tokens: Tensor
    num_seqs: Tensor
    sequence_of_token: Tensor | None
    num_bad_values: Tensor

    @classmethod
    def of_microbatch(cls, microbatch: Mapping[str, Any], mask_key: str = "loss_mask") -> Sequences:
        """Read a mask, `sample_mask`, `cu_seqlens` and `cu_seqlens_padded` of a microbatch."""
        return cls.of(
            microbatch[mask_key],
            microbatch.get("sample_mask"),
            microbatch.get("cu_seqlens"),
            microbatch.get("cu_seqlens_padded"),
        )

    @classmethod
    def of(
        cls,
        loss_mask: Tensor,
        sample_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
    ) -> Sequences:
        """The sequences of a mask. Does not communicate; looks at values on the CPU only.

        Args:
            loss_mask: [b, s], values 0 and 1: one sequence per row; or [1, t] with `cu_seqlens`.
            sample_mask: [b], or [n] with `cu_seqlens`; 0 marks a sequence that only pads the batch.
            cu_seqlens: int [n + 1] or [1, n + 1]; sequence i has the tokens from cu_seqlens[i] to
                cu_seqlens[i + 1]. A sequence of length 0 is not there (loaders repeat the last
                entry to a fixed length).
            cu_seqlens_padded: as `cu_seqlens`, where each sequence is padded: it then *starts* at
                cu_seqlens_padded[i], and `cu_seqlens` tells its length.

        Raises:
            TypeError: not tensors. ValueError: wrong shapes, or (on the CPU) wrong values.
        """
        _check_mask(loss_mask)
        if cu_seqlens is None:
            if cu_seqlens_padded is not None:
                raise ValueError("cu_seqlens_padded needs cu_seqlens, the lengths without padding.")
            return cls._of_rows(loss_mask, sample_mask)
        return cls._of_packed(loss_mask, sample_mask, cu_seqlens, cu_seqlens_padded)

    @classmethod
    def _of_rows(cls, loss_mask: Tensor, sample_mask: Tensor | None) -> Sequences:
        num_rows = loss_mask.shape[0]
        is_real = _checked_sample_mask(sample_mask, num_rows, "[b]")
        valid = loss_mask != 0
        if is_real is None:
            num_seqs = valid.new_tensor(num_rows, dtype=torch.int64)
        else:
            valid = valid & is_real.unsqueeze(1)
            num_seqs = is_real.sum()
        return cls(valid, valid.sum(dim=1), num_seqs, None, num_bad_mask_values(loss_mask))

    @classmethod
    def _of_packed(
        cls,
        loss_mask: Tensor,
        sample_mask: Tensor | None,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
    ) -> Sequences:
        if loss_mask.shape[0] != 1:
            raise ValueError(
                f"With cu_seqlens the loss_mask must have shape [1, t], got "
                f"{tuple(loss_mask.shape)}. Pack the sequences of a microbatch into one row."
            )
        starts_from, lengths = checked_boundaries(cu_seqlens, cu_seqlens_padded, loss_mask)
        num_slots = lengths.numel()
        sequence, is_inside = sequence_of_positions(starts_from, lengths, loss_mask.shape[1])
        is_inside = is_inside.unsqueeze(0)
        num_bad = num_bad_mask_values(loss_mask) + ((loss_mask != 0) & ~is_inside).sum()
        if loss_mask.device.type == "cpu" and int(num_bad) > 0:
            raise ValueError(
                f"loss_mask is 1 at {int(num_bad)} tokens outside every sequence of cu_seqlens; "
                "padding between or after sequences must have mask 0."
            )
        valid = (loss_mask != 0) & is_inside
        is_there = lengths > 0
        is_real = _checked_sample_mask(sample_mask, num_slots, "[num_seqs]")
        if is_real is not None:
            valid = valid & is_real[sequence]
            is_there = is_there & is_real
        num_tokens = torch.zeros(num_slots, dtype=torch.int64, device=loss_mask.device)
        num_tokens.scatter_add_(0, sequence, valid[0].long())
        return cls(valid, num_tokens, is_there.sum(), sequence.unsqueeze(0), num_bad)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """A value per sequence [n], or one for all [], as a value per token: [b, s] or [b, 1]."""
        per_sequence = per_sequence.expand(self.num_tokens.shape[0])
        if self.sequence_of_token is None:
            return per_sequence.unsqueeze(1)
        if per_sequence.numel() == 0:
            return per_sequence.new_zeros(self.valid.shape)
        return per_sequence[self.sequence_of_token]

    def to(self, device: torch.device) -> Sequences:
        """The same on another device, without waiting."""
        if self.valid.device == device:
            return self
        of_token = self.sequence_of_token
        return replace(
            self,
            valid=self.valid.to(device, non_blocking=True),
            num_tokens=self.num_tokens.to(device, non_blocking=True),
            sequence_of_token=None if of_token is None else of_token.to(device, non_blocking=True),
        )


def checked_boundaries(
    cu_seqlens: Any, cu_seqlens_padded: Any, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(where the sequences start and the last one ends [n + 1], their lengths [n]), int64."""
    ends = checked_cu_seqlens(cu_seqlens, "cu_seqlens", loss_mask)
    starts = ends
    if cu_seqlens_padded is not None:
        starts = checked_cu_seqlens(cu_seqlens_padded, "cu_seqlens_padded", loss_mask)
        if starts.shape != ends.shape:
            raise ValueError(
                f"cu_seqlens has {ends.numel()} entries and cu_seqlens_padded {starts.numel()}; "
                "they must describe the same sequences."
            )
    return starts, ends.diff()


def checked_cu_seqlens(cu_seqlens: Any, name: str, loss_mask: Tensor) -> Tensor:
    """int64 [n + 1] on the mask's device; raises on a wrong shape, dtype or CPU values."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(cu_seqlens).__name__}.")
    if cu_seqlens.dtype.is_floating_point or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {cu_seqlens.dtype}.")
    if cu_seqlens.dim() == 2 and cu_seqlens.shape[0] == 1:
        cu_seqlens = cu_seqlens[0]
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"{name} must have shape [num_seqs + 1] or [1, num_seqs + 1] with at least one "
            f"sequence, got {tuple(cu_seqlens.shape)}."
        )
    if cu_seqlens.device.type == "cpu":
        values = cu_seqlens.tolist()
        ordered = all(a <= b for a, b in zip(values, values[1:], strict=False))
        if values[0] != 0 or not ordered or values[-1] > loss_mask.shape[1]:
            raise ValueError(
                f"{name} must rise from 0 to at most the mask's width {loss_mask.shape[1]}, got "
                f"{values[:8]}{'...' if len(values) > 8 else ''} up to {values[-1]}."
            )
    return cu_seqlens.to(loss_mask.device, torch.int64, non_blocking=True)


def sequence_of_positions(starts: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which sequence each token of a packed row belongs to, and whether it is inside of it.

    Args:
        starts: int64 [n + 1], where each sequence starts, and where the last one's padding ends.
        lengths: int64 [n], without padding.
        width: t, the tokens of the row.

    Returns:
        (int64 [t] in 0..n-1, bool [t]: not padding).
    """
    position = torch.arange(width, device=starts.device)
    # The last sequence that starts at or before a token; empty ones never are the last.
    sequence = torch.searchsorted(starts[1:].contiguous(), position, right=True)
    sequence = sequence.clamp(max=lengths.numel() - 1)
    is_inside = position - starts[sequence] < lengths[sequence]
    return sequence, is_inside & (position < starts[-1])


def num_bad_mask_values(loss_mask: Tensor) -> Tensor:
    """How many values are neither 0 nor 1; int64, shape []."""
    if loss_mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.int64, device=loss_mask.device)
    return ((loss_mask != 0) & (loss_mask != 1)).sum()


def _check_mask(loss_mask: Any) -> None:
    if not isinstance(loss_mask, Tensor):
        raise TypeError(f"loss_mask must be a tensor, got {type(loss_mask).__name__}.")
    if loss_mask.dim() != 2:
        raise ValueError(
            "loss_mask must have shape [b, s], one sequence per row, or [1, t] with cu_seqlens; "
            f"got {tuple(loss_mask.shape)}."
        )
    if loss_mask.device.type == "cpu" and int(num_bad_mask_values(loss_mask)) > 0:
        wrong = loss_mask[(loss_mask != 0) & (loss_mask != 1)]
        raise ValueError(
            f"loss_mask may hold only 0 and 1, got {wrong.numel()} other values such as "
            f"{wrong[0].item()}. Put per-token weights into the loss, not into the mask: the mask "
            "is what is counted."
        )


def _checked_sample_mask(sample_mask: Any, num_seqs: int, shape: str) -> Tensor | None:
    """Which sequences are real, bool [num_seqs]; None: all."""
    if sample_mask is None:
        return None
    if not isinstance(sample_mask, Tensor):
        raise TypeError(f"sample_mask must be a tensor, got {type(sample_mask).__name__}.")
    if sample_mask.shape != (num_seqs,):
        raise ValueError(
            f"sample_mask must have shape {shape} = [{num_seqs}], got {tuple(sample_mask.shape)}."
        )
    return sample_mask != 0
