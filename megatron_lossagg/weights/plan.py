"""`WeightPlan`: a step that is counted before it runs, or whose counts are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.reduction import (
    NUM_HELD,
    check_given_counts,
    count_local,
    held_place,
    start_reduction,
)
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.counts.units import LocalUnits
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device
from megatron_lossagg.weights.microbatch import (
    Microbatch,
    WeightOptions,
    check_microbatch,
    masks_to_count,
)
from megatron_lossagg.weights.step_weights import StepWeights, outside_inference_mode
from megatron_lossagg.weights.token_weights import SequenceWeights, sequence_weights
from megatron_lossagg.weights.weighting import Weighting


class WeightPlan(StepWeights):
    """Counts and weights of this rank's microbatches for one step.

    The constructor starts the all-reduce of the counts over the data-parallel group, or none if
    `counts` are given; `weights` waits for it. With `times_num_tokens` weights are T * w instead of
    w, T the tokens of `loss_mask`.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        options: WeightOptions,
        groups: ParallelGroups,
        *,
        identity: Mapping[str, str],
        times_num_tokens: bool = False,
        counts: Mapping[str, GlobalCounts] | None = None,
        num_units: int | None = None,
    ) -> None:
        for index, microbatch in enumerate(microbatches):
            check_microbatch(microbatch, index, options)
        super().__init__(options, masks_to_count(microbatches, options.mask_keys), identity)
        self._times_num_tokens = times_num_tokens
        self.counts_are_given = counts is not None
        sequences = [Sequences.of_microbatches(microbatches, key) for key in self.mask_keys]
        if options.masks_are_cp_sliced:
            sequences = _with_full_counts(sequences, groups)
        units = [
            LocalUnits.of(of_mask, [m["unit_ids"] for m in microbatches], num_units)
            if mask_key in options.masks_with_units
            else None
            for mask_key, of_mask in zip(self.mask_keys, sequences, strict=True)
        ]
        self._local = count_local(sequences, units, self.fingerprint())
        if counts is None:
            self._pending = start_reduction(self._local, groups)
        else:
            self._counts = self._checked_counts(counts)
        self._num_parts = groups.cp_size if options.masks_are_cp_sliced else 1
        # Weights are made where the counts are, so that counts never travel back to the host.
        self._device = communication_device(groups.dp, self._local.vector.device)
        self._weights: list[tuple[Tensor, ...] | None] = [None] * len(microbatches)
        self._factors: list[SequenceWeights] = []

    def __len__(self) -> int:
        return len(self._weights)

    def local_vector(self) -> Tensor:
        """This rank's counts, packed, int64 [VECTOR_LENGTH]."""
        return self._local.vector

    def counted_mask(self, index: int) -> Tensor:
        """The main mask [b, s] of one microbatch, without rows that only pad the batch."""
        return self._local.sequences[0].counted_mask(index)

    def given_here(self) -> Tensor:
        """1, x and x^2 of the counts x that a driver gave, float64 [3, NUM_HELD], 0 elsewhere."""
        found = torch.zeros(3, NUM_HELD, dtype=torch.float64)
        for slot, mask_key in enumerate(self.mask_keys):
            if mask_key not in self.given_counts:
                continue
            for name in ("num_tokens", "num_valid_seqs", "num_seqs"):
                value = getattr(self.given_counts[mask_key], name).double().cpu()
                powers = torch.stack([torch.ones_like(value), value, value**2])
                found[:, held_place(name, slot)] = powers
        return found

    def num_positions(self) -> Tensor:
        """Positions of the main masks of the global batch; -1 where a driver gave the counts."""
        return super().num_positions() * (1 if self.counts_are_given else self._num_parts)

    def check_counts(self) -> None:
        """Raise LossAggError if the counts cannot be right. Waits for the device.

        Counted: see `StepWeights`. Given: smaller than what this rank holds.
        """
        super().check_counts()
        for slot, mask_key in enumerate(self.mask_keys):
            if mask_key in self.given_counts:
                check_given_counts(self.counts_of(mask_key), self._local, slot, mask_key)

    def gradient_factor(self, *, divides_by_num_tokens: bool) -> float:
        """1: weights are divided already."""
        return 1.0

    def expected_weight_sums(self) -> Tensor:
        """Each mode's checksum, times T if weights carry it; float64, shape [num_weightings].

        NaN for a mode without a checksum: `planned_weight_sums`, summed over ranks, stands in.
        """
        sums = []
        for weighting in self._options.weightings:
            counts = self.counts_of(weighting.mask_key)
            checksum = weighting.spec.checksum(counts)
            if checksum is None:
                checksum = torch.full_like(counts.num_tokens, torch.nan, dtype=torch.float64)
            sums.append(checksum)
        multiplier = self._multiplier()
        return torch.stack(sums) if multiplier is None else torch.stack(sums) * multiplier

    def _multiplier(self) -> Tensor | None:
        """T where finalize divides by it; it divides by nothing if T is 0."""
        if not self._times_num_tokens:
            return None
        return self.counts.num_tokens.clamp(min=1).double()

    def weights(self, index: int) -> tuple[Tensor, ...]:
        """The weights [b, s] of one microbatch, per weighting; built once, kept for chunks."""
        found = self._weights[index]
        if found is None:
            # Those that an evaluation asks for first are used by training, too.
            with outside_inference_mode():
                if not self._factors:
                    multiplier = self._multiplier()
                    self._factors = [
                        self._factors_of(w, multiplier) for w in self._options.weightings
                    ]
                found = tuple(factors.spread(index) for factors in self._factors)
            self._weights[index] = found
        return found

    def _factors_of(self, weighting: Weighting, multiplier: Tensor | None) -> SequenceWeights:
        """Of a weighting the weight of a token of each sequence."""
        slot = self.mask_keys.index(weighting.mask_key)
        of_mask = self._local.sequences[slot]
        units = self._local.units[slot] if weighting.spec.needs_units else None
        return sequence_weights(
            of_mask,
            weighting.spec,
            self.counts_of(weighting.mask_key),
            unit_of_seq=None if units is None else units.unit_of_seq.to(self._device),
            multiplier=multiplier,
            weight_dtype=self._options.weight_dtype,
            device=self._device,
        )

    def _checked_counts(self, counts: Mapping[str, GlobalCounts]) -> dict[str, GlobalCounts]:
        """Given counts; raises ValueError if a mask that is needed has none."""
        needed = set(self._options.mask_keys)
        if self._times_num_tokens:
            needed.add(self.mask_keys[0])
        missing = [key for key in self.mask_keys if key in needed and key not in counts]
        if missing:
            raise ValueError(
                f"counts lacks the mask(s) {', '.join(missing)}: pass {{mask_key: "
                f"GlobalCounts(...)}} for {', '.join(k for k in self.mask_keys if k in needed)}. "
                "With calculate_per_token_loss on, Megatron divides by the tokens of 'loss_mask', "
                "whatever masks the terms have."
            )
        for mask_key in self._options.masks_with_units:
            if counts[mask_key].unit_num_tokens is None:
                raise ValueError(
                    f"counts of {mask_key!r} lack those of units, which "
                    f"{self._options.masks_with_units[mask_key]} needs: pass "
                    "GlobalCounts(..., unit_num_tokens=[U], unit_num_seqs=[U])."
                )
        return dict(counts)


def _with_full_counts(sequences: list[Sequences], groups: ParallelGroups) -> list[Sequences]:
    """Sequences of sliced masks with the n_s of whole rows: one all-reduce over the cp group."""
    local = torch.cat([of_mask.num_tokens for of_mask in sequences])
    full = local.to(communication_device(groups.cp, local.device), copy=True)
    all_reduce_sum(full, groups.cp)
    parts = full.to(local.device).split([s.num_tokens.shape[0] for s in sequences])
    return [replace(s, num_tokens=n) for s, n in zip(sequences, parts, strict=True)]
