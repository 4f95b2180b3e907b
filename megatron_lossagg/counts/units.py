"""Units: sequences that belong together, such as the samples of a rollout or a prompt's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.plain_tensors import check_plain_tensor


@dataclass(frozen=True)
class LocalUnits:
    """The units of this rank's sequences, and what this rank adds to their counts.

    Attributes:
        unit_of_seq: the unit of each sequence of all microbatches, int64 [N].
        counts: T_u and B_u of this rank's sequences, int64 [2, U].
        num_bad_ids: ids outside 0..U-1, int64 []; 0 on the CPU, where they have raised.
    """

    unit_of_seq: Tensor
    counts: Tensor
    num_bad_ids: Tensor

    @classmethod
    def of(cls, sequences: Sequences, unit_ids: Sequence[Any], num_units: Any) -> LocalUnits:
        """Count the units of this rank. Does not communicate.

        Args:
            sequences: of all microbatches of this rank.
            unit_ids: per microbatch an integer tensor [n], the unit of each sequence.
            num_units: U, the number of units of the whole global batch.

        Returns:
            T_u and B_u of this rank alone, and the unit of each sequence.

        Raises:
            TypeError: ids that are no integers.
            ValueError: ids of another shape, or (on the CPU) outside 0..U-1.
        """
        if isinstance(num_units, bool) or not isinstance(num_units, int) or num_units < 1:
            raise ValueError(
                f"num_units must be an int of at least 1, got {num_units!r}: the number of units "
                "of the whole global batch, over all ranks."
            )
        num_tokens = sequences.num_tokens
        ids = torch.cat(
            [
                _checked_ids(of_microbatch, size).to(num_tokens.device, torch.int64)
                for of_microbatch, size in zip(unit_ids, sequences.sizes, strict=True)
            ]
        )
        if ids.device.type == "cpu" and ids.numel() > 0:
            _check_range(ids, num_units)
        is_outside = (ids < 0) | (ids >= num_units)
        safe = ids.clamp(0, num_units - 1)
        counts = torch.zeros(2, num_units, dtype=torch.int64, device=ids.device)
        counts[0].scatter_add_(0, safe, num_tokens)
        counts[1].scatter_add_(0, safe, (num_tokens > 0).long())
        return cls(safe, counts, is_outside.sum())


def _checked_ids(unit_ids: Any, num_seqs: int) -> Tensor:
    check_plain_tensor(unit_ids, "unit_ids", "[num_seqs]")
    if unit_ids.dtype.is_floating_point or unit_ids.dtype == torch.bool:
        raise TypeError(f"unit_ids must hold integers, got {unit_ids.dtype}.")
    if unit_ids.shape != (num_seqs,):
        raise ValueError(
            f"unit_ids must have one entry per sequence, [{num_seqs}], got {tuple(unit_ids.shape)}."
        )
    return unit_ids


def _check_range(ids: Tensor, num_units: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= num_units:
        raise ValueError(
            f"unit_ids must be in 0..{num_units - 1} (num_units={num_units}), got values from "
            f"{lowest} to {highest}. Number the units of the global batch densely."
        )
