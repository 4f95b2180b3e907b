"""Sums over whole sequences, wherever their tokens are: in rows, packed, or on several CP ranks.

Under context parallelism a rank holds a part of each sequence and its loss is local:
J = sum over ranks r of S_r, with S_r = sum of w * l over the tokens of rank r. A statistic
m = sum over ranks of m_r enters every S_r, and a parameter's gradient is summed over the ranks, so
rank r must contribute dJ/dm_r = sum over ranks q of dS_q/dm. Hence the sum in `all_reduce_sum`'s
backward pass. What is detached needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lossagg.counts.sequences import checked_boundaries, sequence_of_positions
from megatron_lossagg.groups import all_reduce_sum as sum_in_place
from megatron_lossagg.token_losses.masking import check_shape


def sequence_ids_of(
    cu_seqlens: Tensor, length: int, *, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """The sequence of every token of a packed row, before any slicing. Does not communicate.

    Args:
        cu_seqlens: int [n + 1] or [1, n + 1]; sequence i has the tokens from cu_seqlens[i] to
            cu_seqlens[i + 1].
        length: t, the tokens of the row.
        cu_seqlens_padded: as `cu_seqlens`, where each sequence is padded: it then *starts* at
            cu_seqlens_padded[i], and `cu_seqlens` tells its length.

    Returns:
        int64 [1, length] on the device of `cu_seqlens`: 0..n-1, and -1 at padding.

    Raises:
        TypeError: boundaries that are no integers.
        ValueError: no such boundaries (values are checked on the CPU only).
    """
    row = torch.empty((1, length), device=cu_seqlens.device)
    starts, lengths = checked_boundaries(cu_seqlens, cu_seqlens_padded, row)
    sequence, is_inside = sequence_of_positions(starts, lengths, length)
    return sequence.masked_fill(~is_inside, -1).unsqueeze(0)


@dataclass(frozen=True)
class TokensOfSequences:
    """Which sequence each token of this rank belongs to: rows, or ids.

    Attributes:
        valid: bool [b, s].
        index: int64 [b * s], the sequence of each token, `num_sequences` where there is none; None
            where row r is sequence r.
        num_sequences: n.
        cp_group: the ranks that hold other parts of the same sequences; None: this rank holds them.
    """

    valid: Tensor
    index: Tensor | None
    num_sequences: int
    cp_group: Any

    @classmethod
    def of(
        cls,
        valid: Tensor,
        sequence_ids: Tensor | None,
        num_sequences: int | None,
        cp_group: Any,
    ) -> TokensOfSequences:
        """Check what a loss was given. Does not communicate; looks at values on the CPU only."""
        if sequence_ids is None:
            if num_sequences is not None:
                raise ValueError(
                    f"num_sequences={num_sequences} needs sequence_ids. Without them each row is "
                    "one sequence; for packed sequences pass sequence_ids_of(cu_seqlens, length)."
                )
            return cls(valid, None, valid.shape[0], cp_group)
        check_shape("sequence_ids", sequence_ids, valid)
        if sequence_ids.is_floating_point() or sequence_ids.dtype == torch.bool:
            raise TypeError(f"sequence_ids must hold integers, got {sequence_ids.dtype}.")
        if isinstance(num_sequences, bool) or not isinstance(num_sequences, int):
            raise TypeError(
                "sequence_ids need num_sequences, an int and not a tensor, such as "
                f"cu_seqlens.numel() - 1; got {num_sequences!r}."
            )
        if valid.device.type == "cpu" and bool((valid & (sequence_ids < 0)).any()):
            raise ValueError("A valid token has a negative sequence id; those are for padding.")
        if valid.device.type == "cpu" and bool((sequence_ids >= num_sequences).any()):
            raise ValueError(
                f"sequence_ids go up to {int(sequence_ids.max())}, but num_sequences is "
                f"{num_sequences}; expected ids from 0 to num_sequences - 1."
            )
        index = sequence_ids.long().masked_fill(sequence_ids < 0, num_sequences)
        return cls(valid, index.flatten(), num_sequences, cp_group)

    def sums(self, *values: Tensor) -> Tensor:
        """Sum each of k values over every sequence: [k, n]. One all-reduce over `cp_group`.

        On a GPU the order of additions over ids is not fixed, unless
        `torch.use_deterministic_algorithms(True)` is on.

        Args:
            *values: k tensors [b, s] of one dtype, 0 at masked positions.

        Returns:
            [k, n] in their dtype, summed over `cp_group`.
        """
        stacked = torch.stack(values)
        if self.index is None:
            local = stacked.sum(dim=2)
        else:
            local = stacked.new_zeros(len(values), self.num_sequences + 1)
            local = local.index_add(1, self.index, stacked.flatten(1))[:, : self.num_sequences]
        return all_reduce_sum(local, self.cp_group)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the valid tokens of each sequence: [n]. One all-reduce over `cp_group`.

        A sequence without valid tokens has 0.

        Args:
            values: [b, s], 0 at masked positions.

        Returns:
            [n] in its dtype, over all tokens of `cp_group`.
        """
        total, count = self.sums(values, self.valid.to(values.dtype))
        return total / count.detach().clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """A value per sequence [n] as a value per token [b, s], 0 at masked positions.

        A valid token without a sequence gets NaN.
        """
        if self.index is None:
            spread = per_sequence.unsqueeze(1).expand(self.valid.shape)
        else:
            none = per_sequence.new_full((1,), torch.nan)
            spread = torch.cat([per_sequence, none]).index_select(0, self.index)
        return spread.reshape(self.valid.shape).masked_fill(~self.valid, 0)


def all_reduce_sum(local: Tensor, group: Any) -> Tensor:
    """Sum over `group`, differentiably (communicates over the group that is passed).

    The backward pass sums the gradients over `group` in one more all-reduce, if `local` requires a
    gradient; every rank must then run it.
    """
    return local if group is None else _AllReduceSum.apply(local, group)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = local.clone(memory_format=torch.contiguous_format)
        sum_in_place(total, group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        sum_in_place(grad, ctx.group)
        return grad, None
