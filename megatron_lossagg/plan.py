"""The plan of one optimizer step: counts under way, weights on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts import (
    GlobalCounts,
    PendingCounts,
    check_given_counts,
    count_local,
    start_reduction,
)
from megatron_lossagg.errors import LossAggError, keys_or_type
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.units import LocalUnits
from megatron_lossagg.weights import weights_of_sequences

Microbatch = Mapping[str, Any]

# Fields that only serve counting. They have no token dimension, so context-parallel slicers, which
# cut every field, would break on them.
COUNTING_KEYS = ("sample_mask", "unit_ids")
RESERVED_KEYS = (*COUNTING_KEYS, "cu_seqlens", "cu_seqlens_padded")


def check_weights_key(weights_key: Any) -> None:
    """Raise ValueError unless it can name the field of the weights."""
    if not isinstance(weights_key, str) or not weights_key or weights_key in RESERVED_KEYS:
        raise ValueError(
            f"weights_key={weights_key!r} cannot name the field of the weights; pass 'loss_mask' "
            f"or a name of your own ({', '.join(RESERVED_KEYS)} have other meanings)."
        )


@dataclass(frozen=True)
class WeightOptions:
    """How weights are built and carried.

    Attributes:
        spec: the mode and its options.
        weights_key: the field of a microbatch that carries them.
        weight_dtype: their dtype.
        times_num_tokens: carry T * w (regime R3) instead of w.
        fingerprint: a number that is equal on ranks configured alike.
        masks_are_cp_sliced: masks are this context-parallel rank's part already.
    """

    spec: ModeSpec
    weights_key: str
    weight_dtype: torch.dtype
    times_num_tokens: bool
    fingerprint: int
    masks_are_cp_sliced: bool = False


class WeightPlan:
    """Counts and weights of this rank's microbatches for one step.

    The constructor starts the all-reduce of the counts over the data-parallel group, or none if
    `counts` are given; `microbatch` waits for it.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        options: WeightOptions,
        groups: ParallelGroups,
        counts: GlobalCounts | None = None,
        num_units: int | None = None,
    ) -> None:
        self._options = options
        for index, microbatch in enumerate(microbatches):
            check_microbatch(microbatch, index, options)
        self._microbatches = list(microbatches)
        sequences = [Sequences.of_microbatch(m) for m in self._microbatches]
        if options.masks_are_cp_sliced:
            sequences = _with_full_counts(sequences, groups)
        units = None
        if options.spec.needs_units:
            units = LocalUnits.of(sequences, [m["unit_ids"] for m in self._microbatches], num_units)
        self._local = count_local(sequences, units, options.fingerprint)
        self._pending: PendingCounts | None = None
        self._counts = counts
        if counts is None:
            self._pending = start_reduction(self._local, groups)
        # Weights are made where the counts are, so that counts never travel back to the host.
        self._device = communication_device(groups.dp, self._local.vector.device)
        self._weights: list[Tensor | None] = [None] * len(self._microbatches)

    def __len__(self) -> int:
        return len(self._microbatches)

    @property
    def counts(self) -> GlobalCounts:
        """Counts of the global batch; waits for the all-reduce that the constructor started."""
        if self._counts is None:
            assert self._pending is not None
            self._counts = self._pending.wait()
        return self._counts

    def check_counts(self) -> None:
        """Raise LossAggError if the counts cannot be right. Waits for the device.

        Counted: ranks were configured differently. Given: smaller than what this rank holds.
        """
        if self._pending is not None:
            self._pending.check()
        else:
            check_given_counts(self.counts, self._local)

    def expected_weight_sum(self) -> Tensor:
        """The mode's checksum, times T under R3; float64, shape []."""
        checksum = self._options.spec.checksum(self.counts)
        return checksum * self.counts.num_tokens if self._options.times_num_tokens else checksum

    def weights(self, index: int) -> Tensor:
        """The weights [b, s] of one microbatch, built once, kept for other chunks."""
        weights = self._weights[index]
        if weights is None:
            units = self._local.units
            weights = weights_of_sequences(
                self._local.sequences[index].to(self._device),
                self._options.spec,
                self.counts,
                unit_of_seq=None if units is None else units.unit_of_seq[index].to(self._device),
                times_num_tokens=self._options.times_num_tokens,
                weight_dtype=self._options.weight_dtype,
            )
            self._weights[index] = weights
        return weights

    def microbatch(self, index: int) -> dict[str, Any]:
        """A planned microbatch with its weights."""
        return self.with_weights(self._microbatches[index], index)

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy of a microbatch with weights `index`, without fields that only count."""
        copy = without_counting_keys(microbatch)
        copy[self._options.weights_key] = self.weights(index)
        return copy


def without_counting_keys(microbatch: Microbatch) -> dict[str, Any]:
    """A shallow copy without the fields that only serve counting."""
    return {k: v for k, v in microbatch.items() if k not in COUNTING_KEYS}


def check_microbatch(microbatch: Any, index: int, options: WeightOptions) -> None:
    """Raise on a microbatch that cannot be planned."""
    if not isinstance(microbatch, Mapping):
        raise TypeError(
            f"Microbatch {index} is a {type(microbatch).__name__}; expected a dict of tensors with "
            "'loss_mask'."
        )
    if microbatch.get("loss_mask") is None:
        raise ValueError(
            f"Microbatch {index} has no 'loss_mask'; its keys are {keys_or_type(microbatch)}. "
            "Add the mask [b, s] of the tokens that count, aligned with the labels."
        )
    if options.weights_key != "loss_mask" and options.weights_key in microbatch:
        raise ValueError(
            f"Microbatch {index} already has a field {options.weights_key!r}, where the weights "
            "would go. Rename it, or pass another weights_key to LossAggregator."
        )
    if options.spec.needs_units and microbatch.get("unit_ids") is None:
        raise ValueError(
            f"Microbatch {index} has no 'unit_ids' [num_seqs], which loss_agg_mode="
            f"{options.spec.loss_agg_mode!r} needs: the unit (rollout, prompt) of each sequence."
        )
    if options.masks_are_cp_sliced and microbatch.get("cu_seqlens") is not None:
        raise LossAggError(
            f"Microbatch {index} has cu_seqlens and masks_are_cp_sliced=True: the boundaries of "
            "whole sequences do not describe a sliced mask. Plan with full masks and slice "
            "afterwards with slice_for_cp."
        )


def _with_full_counts(sequences: list[Sequences], groups: ParallelGroups) -> list[Sequences]:
    """Sequences of sliced masks with the n_s of whole rows: one all-reduce over the cp group."""
    local = torch.cat([s.num_tokens for s in sequences])
    full = local.to(communication_device(groups.cp, local.device), copy=True)
    all_reduce_sum(full, groups.cp)
    per_microbatch = full.to(local.device).split([s.num_tokens.shape[0] for s in sequences])
    return [replace(s, num_tokens=n) for s, n in zip(sequences, per_microbatch, strict=True)]
