"""The plan of one optimizer step: counts under way, weights on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import (
    NUM_HELD,
    GlobalCounts,
    PendingCounts,
    check_given_counts,
    count_local,
    held_place,
    start_reduction,
)
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.counts.units import LocalUnits
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device
from megatron_lossagg.weights.metrics import metric_divisors
from megatron_lossagg.weights.microbatch import (
    Microbatch,
    WeightOptions,
    carry_weights,
    check_microbatch,
    fingerprint_of_step,
    masks_to_count,
    tells_num_tokens,
    without_counting_keys,
)
from megatron_lossagg.weights.token_weights import SequenceWeights, sequence_weights
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting


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
        self.mask_keys = masks_to_count(microbatches, options.mask_keys)
        self._slots = {mask_key: slot for slot, mask_key in enumerate(self.mask_keys)}
        sequences = [Sequences.of_microbatches(microbatches, key) for key in self._slots]
        if options.masks_are_cp_sliced:
            sequences = _with_full_counts(sequences, groups)
        units = [
            LocalUnits.of(of_mask, [m["unit_ids"] for m in self._microbatches], num_units)
            if mask_key in options.masks_with_units
            else None
            for mask_key, of_mask in zip(self._slots, sequences, strict=True)
        ]
        self._local = count_local(sequences, units, fingerprint_of_step(options, self.mask_keys))
        self._pending: PendingCounts | None = None
        self._counts = {} if counts is None else self._checked_counts(counts)
        if counts is None:
            self._pending = start_reduction(self._local, groups)
        self._num_parts = groups.cp_size if options.masks_are_cp_sliced else 1
        # Weights are made where the counts are, so that counts never travel back to the host.
        self._device = communication_device(groups.dp, self._local.vector.device)
        self._weights: list[tuple[Tensor, ...] | None] = [None] * len(self._microbatches)
        self._factors: list[SequenceWeights] = []

    def __len__(self) -> int:
        return len(self._microbatches)

    @property
    def counts(self) -> GlobalCounts:
        """Counts of `loss_mask`; waits for the all-reduce that the constructor started.

        Of the first term's mask where the microbatches have no `loss_mask`, or where a driver gave
        counts without it.
        """
        main, *others = self.mask_keys
        is_known = self._pending is not None or main in self._counts
        return self.counts_of(main if is_known else others[0])

    def counts_of(self, mask_key: str) -> GlobalCounts:
        """Counts of a mask over the global batch."""
        if mask_key not in self._counts:
            assert self._pending is not None
            self._counts[mask_key] = self._pending.wait(self._slots[mask_key])
        return self._counts[mask_key]

    @property
    def counts_are_given(self) -> bool:
        """Whether a driver gave the counts, so that nothing was reduced."""
        return self._pending is None

    @property
    def counts_are_known(self) -> bool:
        """Whether `counts` can be asked for: always, once the all-reduce has ended."""
        return True

    @property
    def given_counts(self) -> Mapping[str, GlobalCounts]:
        """The counts that a driver gave, by mask."""
        return self._counts if self.counts_are_given else {}

    @property
    def held_here(self) -> Tensor:
        """What this rank's microbatches hold, int64 [NUM_HELD], see `held_counts`."""
        return self._local.held

    def given_here(self) -> Tensor:
        """1, x and x^2 of the counts x that a driver gave, float64 [3, NUM_HELD], 0 elsewhere."""
        found = torch.zeros(3, NUM_HELD, dtype=torch.float64)
        for mask_key, slot in self._slots.items():
            if mask_key not in self.given_counts:
                continue
            for name in ("num_tokens", "num_valid_seqs", "num_seqs"):
                value = getattr(self.given_counts[mask_key], name).double().cpu()
                powers = torch.stack([torch.ones_like(value), value, value**2])
                found[:, held_place(name, slot)] = powers
        return found

    def num_positions(self) -> Tensor:
        """Positions of the main masks of the global batch; -1 where a driver gave the counts."""
        if self._pending is None:
            return torch.full_like(self.counts.num_tokens, -1)
        return self._pending.num_positions * self._num_parts

    @property
    def weight_eps(self) -> float:
        """Machine epsilon of the weights' dtype."""
        return torch.finfo(self._options.weight_dtype).eps

    def check_counts(self) -> None:
        """Raise LossAggError if the counts cannot be right. Waits for the device.

        Counted: ranks were configured differently. Given: smaller than what this rank holds.
        """
        if self._pending is not None:
            self._pending.check()
            return
        for mask_key, slot in self._slots.items():
            if mask_key in self._counts:
                check_given_counts(self.counts_of(mask_key), self._local, slot, mask_key)

    def expected_weight_sums(self) -> Tensor:
        """Each mode's checksum, times T if weights carry it; float64, shape [num_weightings].

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

    @cached_property
    def metric_divisors(self) -> Tensor | None:
        """What metric sums are divided by, float64 [number of them]; None if there are none."""
        if not self._options.metrics:
            return None
        with outside_inference_mode():
            return metric_divisors(self._options.metrics, self.counts_of).to(self._device)

    def _times(self) -> Tensor | None:
        """T where finalize divides by it; it divides by nothing if T is 0."""
        if not self._options.times_num_tokens:
            return None
        return self.counts.num_tokens.clamp(min=1).double()

    def weights(self, index: int) -> tuple[Tensor, ...]:
        """The weights [b, s] of one microbatch, per weighting; built once, kept for chunks."""
        found = self._weights[index]
        if found is None:
            # Those that an evaluation asks for first are used by training, too.
            with outside_inference_mode():
                if not self._factors:
                    times = self._times()
                    self._factors = [self._factors_of(w, times) for w in self._options.weightings]
                found = tuple(factors.spread(index) for factors in self._factors)
            self._weights[index] = found
        return found

    def _factors_of(self, weighting: Weighting, times: Tensor | None) -> SequenceWeights:
        """Of a weighting the weight of a token of each sequence."""
        slot = self._slots[weighting.mask_key]
        of_mask = self._local.sequences[slot]
        units = self._local.units[slot] if weighting.spec.needs_units else None
        return sequence_weights(
            of_mask,
            weighting.spec,
            self.counts_of(weighting.mask_key),
            unit_of_seq=None if units is None else units.unit_of_seq.to(self._device),
            times=times,
            weight_dtype=self._options.weight_dtype,
            device=self._device,
        )

    def microbatch(self, index: int) -> dict[str, Any]:
        """A planned microbatch with its weights."""
        return self.with_weights(self._microbatches[index], index)

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy of a microbatch with weights `index`, without fields that only count."""
        copy = without_counting_keys(microbatch)
        if tells_num_tokens(microbatch, self._options):
            copy[MAIN_MASK] = self._local.sequences[0].counted_mask(index)
        carry_weights(copy, self.weights(index), self._options)
        return copy

    def _checked_counts(self, counts: Mapping[str, GlobalCounts]) -> dict[str, GlobalCounts]:
        """Given counts; raises ValueError if a mask that is needed has none."""
        needed = set(self._options.mask_keys)
        if self._options.times_num_tokens:
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


def outside_inference_mode() -> AbstractContextManager[None]:
    """Tensors that are made in this context can be used in a graph later; nothing there has one."""
    if not torch.is_inference_mode_enabled():
        return _NO_CONTEXT  # entering a mode costs more than what is done for a microbatch
    return torch.inference_mode(False)


_NO_CONTEXT = nullcontext()


def _with_full_counts(sequences: list[Sequences], groups: ParallelGroups) -> list[Sequences]:
    """Sequences of sliced masks with the n_s of whole rows: one all-reduce over the cp group."""
    local = torch.cat([of_mask.num_tokens for of_mask in sequences])
    full = local.to(communication_device(groups.cp, local.device), copy=True)
    all_reduce_sum(full, groups.cp)
    parts = full.to(local.device).split([s.num_tokens.shape[0] for s in sequences])
    return [replace(s, num_tokens=n) for s, n in zip(sequences, parts, strict=True)]
