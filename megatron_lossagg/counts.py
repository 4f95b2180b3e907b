"""Counts of the global batch: integers, summed once per step over the data-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device

# Layout of the vector that is reduced: 8 header entries, then 3 entries per mask slot. Its length
# never depends on the configuration, so that ranks which were configured differently still run the
# same collective and can find out. 32 int64 are 256 bytes.
NUM_MASK_SLOTS = 8
_RANKS, _FINGERPRINT, _FINGERPRINT_SQUARED, _MICROBATCHES, _BAD_MASK_VALUES = range(5)
_HEADER = 8
VECTOR_LENGTH = _HEADER + 3 * NUM_MASK_SLOTS
# fingerprint^2 summed over 2^14 ranks must stay below 2^63.
FINGERPRINT_BITS = 24


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


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of one global batch: all sequences of one optimizer step. int64 tensors of shape [].

    Built by `count_global_batch`, or by a driver that knows the batch (Python ints are accepted).

    Attributes:
        num_tokens: T, tokens whose mask is 1.
        num_valid_seqs: sequences with at least one such token.
        num_seqs: sequences, valid or not, without rows that a `sample_mask` marks as padding.

    Raises:
        TypeError: a count is a float or a bool. ValueError: a count is negative or not one number.
    """

    num_tokens: Tensor
    num_valid_seqs: Tensor
    num_seqs: Tensor

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _as_count(field.name, getattr(self, field.name)))

    def to(self, device: torch.device) -> GlobalCounts:
        """The same counts on `device`. Moving them from a GPU to the CPU waits for the GPU."""
        if self.num_tokens.device == device:
            return self
        return GlobalCounts(
            *(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self))
        )


def valid_tokens(loss_mask: Tensor, sample_mask: Tensor | None = None) -> Tensor:
    """Which tokens count: bool [b, s]. Does not communicate.

    Args:
        loss_mask: [b, s], values 0 and 1.
        sample_mask: [b]; 0 marks a row that only pads the batch.

    Raises:
        TypeError: not tensors.
        ValueError: wrong shapes, or (on the CPU, where looking costs nothing) other values. On a
            GPU other values are counted and raise in the step's `validate`.
    """
    for name, mask in {"loss_mask": loss_mask, "sample_mask": sample_mask}.items():
        if not isinstance(mask, Tensor) and not (name == "sample_mask" and mask is None):
            raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}.")
    if loss_mask.dim() != 2:
        raise ValueError(
            f"loss_mask must have shape [b, s], one sequence per row; got {tuple(loss_mask.shape)}."
        )
    if loss_mask.device.type == "cpu" and int(num_bad_mask_values(loss_mask)) > 0:
        wrong = loss_mask[(loss_mask != 0) & (loss_mask != 1)]
        raise ValueError(
            f"loss_mask may hold only 0 and 1, got {wrong.numel()} other values such as "
            f"{wrong[0].item()}. Put per-token weights into the loss, not into the mask: the mask "
            "is what is counted."
        )
    valid = loss_mask != 0
    if sample_mask is not None:
        if sample_mask.shape != loss_mask.shape[:1]:
            raise ValueError(
                f"sample_mask must have shape [b] = [{loss_mask.shape[0]}], got "
                f"{tuple(sample_mask.shape)}."
            )
        valid = valid & (sample_mask != 0).unsqueeze(1)
    return valid


def num_bad_mask_values(loss_mask: Tensor) -> Tensor:
    """How many values are neither 0 nor 1; int64, shape []."""
    if loss_mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.int64, device=loss_mask.device)
    return ((loss_mask != 0) & (loss_mask != 1)).sum()


@dataclass(frozen=True)
class LocalCounts:
    """What this rank's microbatches hold: kept so that masks are read once.

    Attributes:
        valid: bool [b, s] per microbatch.
        num_tokens_of_rows: n_s, int64 [b] per microbatch.
        vector: the packed int64 [VECTOR_LENGTH] contribution of this rank.
    """

    valid: list[Tensor]
    num_tokens_of_rows: list[Tensor]
    vector: Tensor


def count_local(
    loss_masks: Sequence[Tensor],
    sample_masks: Sequence[Tensor | None] | None = None,
    fingerprint: int = 0,
) -> LocalCounts:
    """Count this rank's masks. Does not communicate."""
    if not isinstance(loss_masks, Sequence) or not loss_masks:
        size = "empty " if isinstance(loss_masks, Sequence) else ""
        raise ValueError(
            "Expected a non-empty list of loss masks [b, s], one per microbatch; got: "
            f"{size}{type(loss_masks).__name__}."
        )
    sample_masks = [None] * len(loss_masks) if sample_masks is None else sample_masks
    if len(sample_masks) != len(loss_masks):
        raise ValueError(
            f"Got {len(sample_masks)} sample_masks for {len(loss_masks)} loss masks; pass one per "
            "microbatch (None where all rows are real)."
        )
    valid = [valid_tokens(m, s) for m, s in zip(loss_masks, sample_masks, strict=True)]
    of_rows = [v.sum(dim=1) for v in valid]
    all_rows = torch.cat(of_rows)
    num_seqs = sum(
        (v.new_tensor(len(v), dtype=torch.int64) if s is None else (s != 0).sum())
        for v, s in zip(valid, sample_masks, strict=True)
    )
    vector = torch.zeros(VECTOR_LENGTH, dtype=torch.int64, device=all_rows.device)
    vector[_RANKS] = 1
    vector[_FINGERPRINT] = fingerprint
    vector[_FINGERPRINT_SQUARED] = fingerprint**2
    vector[_MICROBATCHES] = len(loss_masks)
    if vector.device.type != "cpu":  # on the CPU valid_tokens has raised already
        vector[_BAD_MASK_VALUES] = torch.stack([num_bad_mask_values(m) for m in loss_masks]).sum()
    vector[_HEADER] = all_rows.sum()
    vector[_HEADER + 1] = (all_rows > 0).sum()
    vector[_HEADER + 2] = num_seqs
    return LocalCounts(valid, of_rows, vector)


class PendingCounts:
    """Counts whose all-reduce may still be running."""

    def __init__(self, vector: Tensor, work: Any) -> None:
        self._vector = vector
        self._work = work

    def wait(self) -> GlobalCounts:
        """The counts. Under NCCL this orders streams and does not block the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        tokens, valid, nominal = self._vector[_HEADER : _HEADER + 3].unbind()
        return GlobalCounts(num_tokens=tokens, num_valid_seqs=valid, num_seqs=nominal)

    def check(self) -> None:
        """Raise LossAggError if ranks were configured differently or a mask held other values.

        Reads the vector on the host, so it waits for the device.
        """
        self.wait()
        header = self._vector[:_HEADER].tolist()
        if header[_FINGERPRINT_SQUARED] * header[_RANKS] != header[_FINGERPRINT] ** 2:
            raise LossAggError(
                "The data-parallel ranks were configured differently (loss_agg_mode, "
                "loss_scale_factor, norm_semantics, sequence_count, cp_gradient or the return "
                "convention): their weights would not belong to one objective. Build "
                "LossAggregator with the same arguments on every rank."
            )
        if header[_BAD_MASK_VALUES] > 0:
            raise LossAggError(
                f"{header[_BAD_MASK_VALUES]} mask values in the global batch are neither 0 nor 1. "
                "Put per-token weights into the loss, not into the mask: the mask is what is "
                "counted."
            )


def start_reduction(local: LocalCounts, groups: ParallelGroups) -> PendingCounts:
    """Start the all-reduce of a rank's counts over the data-parallel group (dp, without cp)."""
    device = communication_device(groups.dp, local.vector.device)
    vector = local.vector.to(device, copy=True)  # the local counts stay what they are
    return PendingCounts(vector, all_reduce_sum(vector, groups.dp, async_op=True))


def check_given_counts(counts: GlobalCounts, local: LocalCounts) -> None:
    """Raise LossAggError if a caller's counts are below this rank's own. Waits for the device."""
    held_here = local.vector[_HEADER : _HEADER + 3].tolist()
    for name, held in zip(("num_tokens", "num_valid_seqs", "num_seqs"), held_here, strict=True):
        given = int(getattr(counts, name))
        if given < held:
            raise LossAggError(
                f"counts says {name}={given}, but this rank's microbatches alone hold {held}. Pass "
                "the counts of the whole global batch (all ranks and microbatches of the step), or "
                "leave counts out."
            )


def count_global_batch(
    loss_masks: Sequence[Tensor],
    groups: ParallelGroups,
    *,
    sample_masks: Sequence[Tensor | None] | None = None,
) -> GlobalCounts:
    """Count the global batch: one all-reduce over the data-parallel group (dp, without cp).

    T = sum of the masks, B = sequences, over all ranks and microbatches. One int64 vector of 256
    bytes is reduced, whatever the number of microbatches. Every rank of the group must call it.

    Args:
        loss_masks: this rank's masks, one [b, s] per microbatch, at full length (before
            context-parallel slicing), values 0 and 1.
        groups: whose `dp` group holds the ranks with different data;
            `ParallelGroups.from_megatron()` or `ParallelGroups.single_process()`.
        sample_masks: per microbatch a [b] tensor whose 0 marks a row that only pads the batch, or
            None.

    Returns:
        GlobalCounts, summed over ranks and microbatches.

    Raises:
        ValueError: no masks, a wrong shape or other values than 0 and 1.
        LossAggError: a mask on a GPU held other values than 0 and 1.
    """
    pending = start_reduction(count_local(loss_masks, sample_masks), groups)
    pending.check()
    return pending.wait()
