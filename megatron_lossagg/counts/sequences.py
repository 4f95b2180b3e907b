"""Which tokens of a microbatch count, and to which sequence each belongs: padded or packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.masks import as_numbers, checked_mask, count_rows
from megatron_lossagg.plain_tensors import check_plain_tensor

_KEYS_BESIDE_A_MASK = ("sample_mask", "cu_seqlens", "cu_seqlens_padded")


@dataclass(frozen=True)
class Sequences:
    """The sequences of some microbatches under one mask, in order; N of them in all.

    Attributes:
        masks: of each microbatch [b, s], values 0 and 1, any dtype.
        sizes: the number of sequences of each microbatch.
        num_tokens: n_s, the valid tokens of each sequence, int64 [N]; 0 where `sample_mask` is 0.
        num_seqs: sequences that are there, valid or not; a number, or int64 [].
        sequence_of_token: of each microbatch int64 [b, s], in 0..n-1; None where row r is
            sequence r.
        num_bad_values: mask values that are neither 0 nor 1, or that are 1 outside every sequence;
            a number, or int64 []. 0 on the CPU, where such a mask has raised.
    """

    masks: list[Tensor]
    sizes: list[int]
    num_tokens: Tensor
    num_seqs: Tensor | int
    sequence_of_token: list[Tensor | None]
    num_bad_values: Tensor | int

    @classmethod
    def of_microbatches(
        cls, microbatches: Sequence[Mapping[str, Any]], mask_key: str = "loss_mask"
    ) -> Sequences:
        """Read a mask, `sample_mask`, `cu_seqlens` and `cu_seqlens_padded` of each microbatch."""
        keys = (mask_key, *_KEYS_BESIDE_A_MASK)
        fields = [tuple(map(microbatch.get, keys)) for microbatch in microbatches]
        try:
            return cls.of_fields(fields)
        except (TypeError, ValueError) as error:
            if mask_key == "loss_mask" or "loss_mask" not in str(error):
                raise
            raise type(error)(str(error).replace("loss_mask", mask_key)) from error

    @classmethod
    def of(
        cls,
        loss_mask: Tensor,
        sample_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
    ) -> Sequences:
        """The sequences of one mask. Does not communicate; looks at values on the CPU only.

        Args:
            loss_mask: [b, s], values 0 and 1: one sequence per row; or [1, t] with `cu_seqlens`.
            sample_mask: [b], or [n] with `cu_seqlens`; 0 marks a sequence that only pads the batch.
            cu_seqlens: int [n + 1] or [1, n + 1]; sequence i has the tokens from cu_seqlens[i] to
                cu_seqlens[i + 1]. A sequence of length 0 is not there (loaders repeat the last
                entry to a fixed length).
            cu_seqlens_padded: as `cu_seqlens`, where each sequence is padded: it then *starts* at
                cu_seqlens_padded[i], and `cu_seqlens` tells its length.

        Returns:
            The sequences, with their n_s.

        Raises:
            TypeError: not tensors.
            ValueError: wrong shapes, or (on the CPU) wrong values.
        """
        return cls.of_fields([(loss_mask, sample_mask, cu_seqlens, cu_seqlens_padded)])

    @classmethod
    def of_fields(cls, fields: Sequence[tuple[Any, ...]]) -> Sequences:
        """Of some microbatches: for each the arguments of `of`. Masks are read in bulk."""
        masks = [checked_mask(of_microbatch[0]) for of_microbatch in fields]
        num_tokens, num_bad = count_rows(masks)
        sizes = [mask.shape[0] for mask in masks]
        if all(all(field is None for field in beside) for _, *beside in fields):
            return cls(masks, sizes, num_tokens, sum(sizes), [None] * len(masks), num_bad)
        parts = [
            cls._of_rows(mask, of_rows, sample_mask, cu_seqlens_padded)
            if cu_seqlens is None
            else cls._of_packed(mask, sample_mask, cu_seqlens, cu_seqlens_padded)
            for mask, of_rows, (_, sample_mask, cu_seqlens, cu_seqlens_padded) in zip(
                masks, num_tokens.split(sizes), fields, strict=True
            )
        ]
        return cls(
            masks,
            [size for part in parts for size in part.sizes],
            torch.cat([part.num_tokens for part in parts]),
            sum(part.num_seqs for part in parts),
            [sequence for part in parts for sequence in part.sequence_of_token],
            num_bad + sum(part.num_bad_values for part in parts),
        )

    @classmethod
    def _of_rows(
        cls, mask: Tensor, num_tokens: Tensor, sample_mask: Any, cu_seqlens_padded: Any
    ) -> Sequences:
        if cu_seqlens_padded is not None:
            raise ValueError("cu_seqlens_padded needs cu_seqlens, the lengths without padding.")
        num_rows = mask.shape[0]
        is_real = _checked_sample_mask(sample_mask, num_rows, "[b]")
        if is_real is None:
            return cls([mask], [num_rows], num_tokens, num_rows, [None], 0)
        return cls([mask], [num_rows], num_tokens * is_real, is_real.sum(), [None], 0)

    @classmethod
    def _of_packed(
        cls, mask: Tensor, sample_mask: Any, cu_seqlens: Any, cu_seqlens_padded: Any
    ) -> Sequences:
        if mask.shape[0] != 1:
            raise ValueError(
                f"With cu_seqlens the loss_mask must have shape [1, t], got "
                f"{tuple(mask.shape)}. Pack the sequences of a microbatch into one row."
            )
        starts, lengths = checked_boundaries(cu_seqlens, cu_seqlens_padded, mask)
        sequence, is_inside = sequence_of_positions(starts, lengths, mask.shape[1])
        is_one = mask[0] != 0
        num_outside = (is_one & ~is_inside).sum()
        if mask.device.type == "cpu" and int(num_outside) > 0:
            raise ValueError(
                f"loss_mask is 1 at {int(num_outside)} tokens outside every sequence of "
                "cu_seqlens; padding between or after sequences must have mask 0."
            )
        is_there = lengths > 0
        num_tokens = torch.zeros_like(lengths)
        num_tokens.scatter_add_(0, sequence, (is_one & is_inside).long())
        is_real = _checked_sample_mask(sample_mask, lengths.numel(), "[num_seqs]")
        if is_real is not None:
            num_tokens = num_tokens * is_real
            is_there = is_there & is_real
        of_token = sequence.unsqueeze(0)
        return cls([mask], [lengths.numel()], num_tokens, is_there.sum(), [of_token], num_outside)

    def counted_mask(self, index: int) -> Tensor:
        """The mask of microbatch `index`, 0 in sequences of `sample_mask` 0; of its own dtype."""
        mask = self.masks[index]
        start = sum(self.sizes[:index])
        has_tokens = (self.num_tokens[start : start + self.sizes[index]] > 0).float()
        return self.spread(index, has_tokens).to(mask.dtype)

    def spread(self, index: int, per_sequence: Tensor, *, selects: bool = False) -> Tensor:
        """A value per sequence of microbatch `index` [n] as a value per token, 0 at masked ones.

        Args:
            index: of the microbatch.
            per_sequence: [n], finite and not negative unless `selects`.
            selects: choose between the value and +0.0 instead of multiplying by the mask.

        Returns:
            Tensor of the mask's shape, and of the dtype and on the device of `per_sequence`.
        """
        mask, sequence = self.masks[index], self.sequence_of_token[index]
        if sequence is None:
            factors = per_sequence.unsqueeze(1)
        else:
            factors = per_sequence[sequence.to(per_sequence.device, non_blocking=True)]
        if selects:
            is_valid = mask.to(per_sequence.device, non_blocking=True) != 0
            return torch.where(is_valid, factors, torch.zeros_like(factors))
        # A product of finite numbers: cheaper than a selection, and just as exact.
        numbers = as_numbers(mask, per_sequence.dtype, per_sequence.device)
        product = numbers * factors if numbers is mask else numbers.mul_(factors)
        # A mask that holds -0.0 must not pass on its sign, which marks a valid token.
        return product.abs_() if mask.is_floating_point() else product


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
    check_plain_tensor(cu_seqlens, name, "[num_seqs + 1]")
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


def _checked_sample_mask(sample_mask: Any, num_seqs: int, shape: str) -> Tensor | None:
    """Which sequences are real, bool [num_seqs]; None: all."""
    if sample_mask is None:
        return None
    check_plain_tensor(sample_mask, "sample_mask", shape)
    if sample_mask.shape != (num_seqs,):
        raise ValueError(
            f"sample_mask must have shape {shape} = [{num_seqs}], got {tuple(sample_mask.shape)}."
        )
    return sample_mask != 0
