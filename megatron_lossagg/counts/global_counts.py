"""`GlobalCounts`: the counts of one global batch, as integers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


def _as_count(name: str, value: Any) -> Tensor:
    """An int64 tensor of shape []; raises on floats, bools and vectors."""
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise TypeError(
                f"GlobalCounts.{name} must be an integer tensor, got {value.dtype}. Counts are "
                "exact: sum masks as integers (mask.sum() of a bool or int mask), do not average "
                "them."
            )
        if value.numel() != 1:
            raise ValueError(
                f"GlobalCounts.{name} must be one number, got shape {tuple(value.shape)}."
            )
        if value.device.type == "cpu" and int(value) < 0:
            raise ValueError(f"GlobalCounts.{name} must be >= 0, got {int(value)}.")
        return value.reshape(()).to(torch.int64)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"GlobalCounts.{name} must be an int or an integer tensor, got {value!r} of type "
            f"{type(value).__name__}. Counts are exact: do not pass floats."
        )
    if value < 0:
        raise ValueError(f"GlobalCounts.{name} must be >= 0, got {value}.")
    return torch.tensor(int(value), dtype=torch.int64)


def _as_unit_counts(name: str, value: Any) -> Tensor:
    """An int64 tensor [U]; raises on anything else."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"GlobalCounts.{name} must be an integer tensor [num_units].")
    if value.dim() != 1:
        raise ValueError(
            f"GlobalCounts.{name} must have shape [num_units], got {tuple(value.shape)}."
        )
    return value.to(torch.int64)


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of one global batch: all sequences of one optimizer step. int64 tensors of shape [].

    Built by `count_global_batch`, or by a driver that knows the batch (Python ints are accepted).

    Attributes:
        num_tokens: T, tokens whose mask is 1.
        num_valid_seqs: sequences with at least one such token.
        num_seqs: sequences, valid or not, without rows that a `sample_mask` marks as padding.
        unit_num_tokens: T_u, the valid tokens of each unit, int64 [U]; None without units.
        unit_num_seqs: B_u, the sequences of each unit with a valid token, int64 [U].

    Raises:
        TypeError: a count is a float or a bool. ValueError: a count is negative or not one number.
    """

    num_tokens: Tensor
    num_valid_seqs: Tensor
    num_seqs: Tensor
    unit_num_tokens: Tensor | None = None
    unit_num_seqs: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_valid_seqs", "num_seqs"):
            object.__setattr__(self, name, _as_count(name, getattr(self, name)))
        for name in ("unit_num_tokens", "unit_num_seqs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _as_unit_counts(name, getattr(self, name)))

    def to(self, device: torch.device) -> GlobalCounts:
        """The same counts on `device`. Moving them from a GPU to the CPU waits for the GPU."""
        if self.num_tokens.device == device:
            return self
        values = (getattr(self, field.name) for field in fields(self))
        moved: list[Any] = [v if v is None else v.to(device, non_blocking=True) for v in values]
        return GlobalCounts(*moved)
