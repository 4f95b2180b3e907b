"""Where the tokens of a microbatch are: on which context-parallel rank, and in which sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def zigzag_positions(seq_length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions that a context-parallel rank holds, in order, as Megatron's slicer cuts them.

    The sequence is cut in 2C pieces; rank r has pieces r and 2C-1-r, which balances causal work.

    Args:
        seq_length: full length s, a multiple of 2C; any length for C = 1.
        cp_size: context-parallel size C.
        cp_rank: r.

    Returns:
        int64 tensor [s / C].

    Raises:
        ValueError: a length that cannot be cut in 2C pieces.
    """
    if cp_size == 1:
        return torch.arange(seq_length)
    if seq_length % (2 * cp_size):
        raise ValueError(
            f"zigzag_positions: seq_length must be a multiple of 2 * cp_size = {2 * cp_size}, "
            f"got {seq_length}; pad the sequences"
        )
    pieces = torch.arange(seq_length).chunk(2 * cp_size)
    return torch.cat([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]])


def cp_positions(width: int, cp_size: int, cp_rank: int, starts: list[int] | None = None) -> Tensor:
    """Positions of a microbatch that a context-parallel rank holds, in order.

    Args:
        width: tokens of a row, on all ranks together.
        cp_size: context-parallel size C.
        cp_rank: r.
        starts: None for a row that is one sequence; for a packed row the boundaries of its
            sequences with their padding, from 0 to `width` (without context parallelism the row may
            go on after the last one). Each sequence is cut on its own.

    Returns:
        int64 tensor [width / C].

    Raises:
        ValueError: boundaries that do not end with the row.
    """
    if starts is None or cp_size == 1:
        return zigzag_positions(width, cp_size, cp_rank)
    if starts[-1] != width:
        raise ValueError(
            f"cp_positions: over {cp_size} context-parallel ranks the sequences with their padding "
            f"must fill the row of {width} tokens, got boundaries up to {starts[-1]}"
        )
    return torch.cat(
        [
            start + zigzag_positions(end - start, cp_size, cp_rank)
            for start, end in zip(starts, starts[1:], strict=False)
        ]
    )


def positions_of_ranks(microbatch: Mapping[str, Tensor], cp_size: int) -> list[Tensor]:
    """Positions of a microbatch that each context-parallel rank holds, see `cp_positions`.

    Args:
        microbatch: at full width, padded or packed, with "loss_mask".
        cp_size: context-parallel size C.

    Returns:
        Per context-parallel rank int64 [t / C].
    """
    starts = microbatch.get("cu_seqlens_padded", microbatch.get("cu_seqlens"))
    boundaries = None if starts is None else starts.tolist()
    mask = microbatch["loss_mask"]
    return [
        cp_positions(mask.shape[1], cp_size, rank, boundaries).to(mask.device)
        for rank in range(cp_size)
    ]


def sequence_of_token(width: int, starts: list[int], lengths: list[int]) -> Tensor:
    """Which sequence each token of a packed row belongs to.

    Args:
        width: tokens of the row.
        starts: boundaries of the sequences with their padding, one more than there are sequences.
        lengths: of the sequences without padding.

    Returns:
        int64 tensor [width]: an index into `lengths`; a number of its own, below 0, for each token
        of the padding, so that no two of them are of one sequence.
    """
    sequences = -1 - torch.arange(width)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        sequences[start : start + length] = index
    return sequences
