"""The plan of one optimizer step: counts under way, weights on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from megatron_lossagg.plain_tensors import dict_hint
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.terms import Weighting, distinct_masks
from megatron_lossagg.units import LocalUnits
from megatron_lossagg.weights import sequence_weights

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
        weightings: the distinct modes and masks; the first belongs to the main mask.
        weights_keys: for each of them the field of a microbatch that carries its weights.
        weight_dtype: their dtype.
        times_num_tokens: carry T * w (regime R3) instead of w, T of the main mask.
        fingerprint: a number that is equal on ranks configured alike.
        masks_are_cp_sliced: masks are this context-parallel rank's part already.
    """

    weightings: tuple[Weighting, ...]
    weights_keys: tuple[str, ...]
    weight_dtype: torch.dtype
    times_num_tokens: bool
    fingerprint: int
    masks_are_cp_sliced: bool = False

    @cached_property
    def mask_keys(self) -> tuple[str, ...]:
        """The distinct masks, the main one first."""
        return distinct_masks(self.weightings)

    @cached_property
    def masks_with_units(self) -> dict[str, str]:
        """The masks whose units are counted, each with a mode that needs it."""
        return {w.mask_key: w.spec.loss_agg_mode for w in self.weightings if w.spec.needs_units}


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
        counts: Mapping[str, GlobalCounts] | None = None,
        num_units: int | None = None,
    ) -> None:
        for index, microbatch in enumerate(microbatches):
            check_microbatch(microbatch, index, options)
        self._options = options
        self._microbatches = list(microbatches)
        self._slots = {mask_key: slot for slot, mask_key in enumerate(options.mask_keys)}
        sequences = [Sequences.of_microbatches(microbatches, key) for key in self._slots]
        if options.masks_are_cp_sliced:
            sequences = _with_full_counts(sequences, groups)
        units = [
            LocalUnits.of(of_mask, [m["unit_ids"] for m in self._microbatches], num_units)
            if mask_key in options.masks_with_units
            else None
            for mask_key, of_mask in zip(self._slots, sequences, strict=True)
        ]
        self._local = count_local(sequences, units, options.fingerprint)
        self._pending: PendingCounts | None = None
        self._counts = {} if counts is None else dict(counts)
        if counts is None:
            self._pending = start_reduction(self._local, groups)
        self._num_parts = groups.cp_size if options.masks_are_cp_sliced else 1
        # Weights are made where the counts are, so that counts never travel back to the host.
        self._device = communication_device(groups.dp, self._local.vector.device)
        self._weights: list[tuple[Tensor, ...] | None] = [None] * len(self._microbatches)
        self._factors: list[tuple[Sequences, tuple[Tensor, ...]]] = []

    def __len__(self) -> int:
        return len(self._microbatches)

    @property
    def counts(self) -> GlobalCounts:
        """Counts of the main mask; waits for the all-reduce that the constructor started."""
        return self.counts_of(self._options.mask_keys[0])

    def counts_of(self, mask_key: str) -> GlobalCounts:
        """Counts of a mask over the global batch."""
        if mask_key not in self._counts:
            assert self._pending is not None
            self._counts[mask_key] = self._pending.wait(self._slots[mask_key])
        return self._counts[mask_key]

    def num_positions(self) -> Tensor:
        """Positions of the main masks of the global batch; -1 where a driver gave the counts."""
        if self._pending is None:
            return torch.full_like(self.counts.num_tokens, -1)
        return self._pending.num_positions * self._num_parts

    def check_counts(self) -> None:
        """Raise LossAggError if the counts cannot be right. Waits for the device.

        Counted: ranks were configured differently. Given: smaller than what this rank holds.
        """
        if self._pending is not None:
            self._pending.check()
            return
        for mask_key, slot in self._slots.items():
            check_given_counts(self.counts_of(mask_key), self._local, slot)

    def expected_weight_sums(self) -> Tensor:
        """Each mode's checksum, times T under R3; float64, shape [number of weightings].

        NaN for a mode without a checksum: `planned_weight_sums`, summed over ranks, stands in.
        """
        sums = []
        for weighting in self._options.weightings:
            checksum = weighting.spec.checksum(self.counts_of(weighting.mask_key))
            nan = torch.full_like(self.counts.num_tokens, float("nan"), dtype=torch.float64)
            sums.append(nan if checksum is None else checksum)
        times = self._times()
        return torch.stack(sums) if times is None else torch.stack(sums) * times

    def planned_weight_sums(self) -> Tensor:
        """The sums of this rank's weights before any slicing; float64 [number of weightings]."""
        per_microbatch = [
            torch.stack([w.sum(dtype=torch.float64) for w in self.weights(index)])
            for index in range(len(self))
        ]
        return torch.stack(per_microbatch).sum(dim=0)

    def _times(self) -> Tensor | None:
        """T in R3, where finalize divides by it; it divides by nothing if T is 0."""
        if not self._options.times_num_tokens:
            return None
        return self.counts.num_tokens.clamp(min=1).double()

    def weights(self, index: int) -> tuple[Tensor, ...]:
        """The weights [b, s] of one microbatch, per weighting; built once, kept for chunks."""
        found = self._weights[index]
        if found is None:
            if not self._factors:
                times = self._times()
                self._factors = [self._factors_of(w, times) for w in self._options.weightings]
            found = tuple(of_mask.spread(index, factor[index]) for of_mask, factor in self._factors)
            self._weights[index] = found
        return found

    def _factors_of(
        self, weighting: Weighting, times: Tensor | None
    ) -> tuple[Sequences, tuple[Tensor, ...]]:
        """Of a weighting its sequences, and per microbatch the weight of a token of each."""
        slot = self._slots[weighting.mask_key]
        of_mask = self._local.sequences[slot]
        units = self._local.units[slot] if weighting.spec.needs_units else None
        factors = sequence_weights(
            of_mask.num_tokens.to(self._device, non_blocking=True),
            weighting.spec,
            self.counts_of(weighting.mask_key),
            unit_of_seq=None if units is None else units.unit_of_seq.to(self._device),
            times=times,
        )
        return of_mask, factors.to(self._options.weight_dtype).split(of_mask.sizes)

    def microbatch(self, index: int) -> dict[str, Any]:
        """A planned microbatch with its weights."""
        return self.with_weights(self._microbatches[index], index)

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy of a microbatch with weights `index`, without fields that only count."""
        copy = without_counting_keys(microbatch)
        copy.update(zip(self._options.weights_keys, self.weights(index), strict=True))
        return copy


def without_counting_keys(microbatch: Microbatch) -> dict[str, Any]:
    """A shallow copy without the fields that only serve counting."""
    return {k: v for k, v in microbatch.items() if k not in COUNTING_KEYS}


def check_microbatches(microbatches: Any, num_microbatches: int | None) -> None:
    """Raise unless it is a list of at least one microbatch, and of so many if a number is given."""
    if not isinstance(microbatches, Sequence) or isinstance(microbatches, str | bytes):
        raise TypeError(
            f"begin_step expects a list of microbatches, got {type(microbatches).__name__}. "
            "For an iterator that a trainer owns, use aggregator.wrap(iterator, "
            "num_microbatches=...)."
        )
    if len(microbatches) == 0:
        raise ValueError(
            "begin_step got an empty list. A rank without sequences passes microbatches whose "
            "masks are all 0 (the schedule needs them); a rank without data passes None and "
            "num_microbatches."
        )
    if num_microbatches is not None and num_microbatches != len(microbatches):
        raise ValueError(
            f"begin_step got {len(microbatches)} microbatches but num_microbatches="
            f"{num_microbatches}; leave num_microbatches out or make them equal."
        )


def check_microbatch(microbatch: Any, index: int, options: WeightOptions) -> None:
    """Raise on a microbatch that cannot be planned."""
    if not isinstance(microbatch, Mapping):
        raise TypeError(
            f"Microbatch {index} is a {type(microbatch).__name__}; expected a dict of tensors with "
            f"{options.mask_keys[0]!r}.{dict_hint(microbatch)}"
        )
    for mask_key in options.mask_keys:
        if microbatch.get(mask_key) is None:
            raise ValueError(
                f"Microbatch {index} has no {mask_key!r}; its keys are "
                f"{keys_or_type(microbatch)}. Add the mask [b, s] of the tokens that count, "
                "aligned with the labels."
            )
    for weights_key in options.weights_keys:
        if weights_key != "loss_mask" and weights_key in microbatch:
            raise ValueError(
                f"Microbatch {index} already has a field {weights_key!r}, where the weights would "
                "go. Rename it, or pass another weights_key to LossAggregator."
            )
    if options.masks_with_units and microbatch.get("unit_ids") is None:
        mode = next(iter(options.masks_with_units.values()))
        raise ValueError(
            f"Microbatch {index} has no 'unit_ids' [num_seqs], which loss_agg_mode={mode!r} "
            "needs: the unit (rollout, prompt) of each sequence."
        )
    if options.masks_are_cp_sliced and microbatch.get("cu_seqlens") is not None:
        raise LossAggError(
            f"Microbatch {index} has cu_seqlens and masks_are_cp_sliced=True: the boundaries of "
            "whole sequences do not describe a sliced mask. Plan with full masks and slice "
            "afterwards with slice_for_cp."
        )


def _with_full_counts(sequences: list[Sequences], groups: ParallelGroups) -> list[Sequences]:
    """Sequences of sliced masks with the n_s of whole rows: one all-reduce over the cp group."""
    local = torch.cat([of_mask.num_tokens for of_mask in sequences])
    full = local.to(communication_device(groups.cp, local.device), copy=True)
    all_reduce_sum(full, groups.cp)
    parts = full.to(local.device).split([s.num_tokens.shape[0] for s in sequences])
    return [replace(s, num_tokens=n) for s, n in zip(sequences, parts, strict=True)]
