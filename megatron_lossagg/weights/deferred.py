"""`denominators="deferred"`: the global counts are known only when the batch is complete.

With streaming rollouts a step begins before its last sequence exists. Most modes are a weight that
is known from its own sequence, over one count of the global batch,

    w_st = u_s / N        u_s = 1, 1/n_s or 1/L        N = T, B or 1

so the loss can carry u and the gradient be divided by N once, at the end. Token-mean in regime R3
needs nothing: that is what Megatron does itself. In every other pairing the gradients of all model
chunks are scaled after `finalize_model_grads`, by 1/N, or T/N where Megatron divided by T, on every
pipeline stage: see `DeferredDivision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import VECTOR_LENGTH, PendingCounts, count_local, sum_local
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import (
    ParallelGroups,
    all_reduce_sum,
    broadcast_from_first,
    communication_device,
)
from megatron_lossagg.modes.spec import undivided_counts
from megatron_lossagg.weights.microbatch import (
    Microbatch,
    WeightOptions,
    check_microbatch,
    masks_to_count,
)
from megatron_lossagg.weights.step_weights import StepWeights, outside_inference_mode
from megatron_lossagg.weights.token_weights import weights_of_sequences
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting


class DeferredPlan(StepWeights):
    """The weights u of microbatches as they come, and this rank's counts so far."""

    def __init__(
        self, options: WeightOptions, num_microbatches: int, *, identity: Mapping[str, str]
    ) -> None:
        super().__init__(options, options.mask_keys, identity)
        [self._weighting] = options.weightings
        self._num_microbatches = num_microbatches
        self._vectors: list[Tensor] = []
        self._main_masks: list[Sequences] = []
        self._weights: list[tuple[Tensor, ...]] = []

    def __len__(self) -> int:
        return self._num_microbatches

    def weights(self, index: int) -> tuple[Tensor, ...]:
        """The weights u [b, s] of one microbatch that has come."""
        return self._weights[index]

    def counted_mask(self, index: int) -> Tensor:
        """The main mask [b, s] of one microbatch, without rows that only pad the batch."""
        return self._main_masks[index].counted_mask(0)

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy with its weights u; counted the first time that `index` comes."""
        if index == len(self._weights):
            self._count(microbatch, index)
        return super().with_weights(microbatch, index)

    def _count(self, microbatch: Microbatch, index: int) -> None:
        check_microbatch(microbatch, index, self._options)
        mask_keys = masks_to_count([microbatch], self._options.mask_keys)
        if index > 0 and mask_keys != self.mask_keys:
            raise ValueError(
                f"Microbatch {index} has the masks {', '.join(mask_keys)}, those before it "
                f"{', '.join(self.mask_keys)}: give {MAIN_MASK!r} to all microbatches, or to none."
            )
        self.mask_keys = mask_keys
        sequences = {key: Sequences.of_microbatches([microbatch], key) for key in mask_keys}
        with outside_inference_mode():
            weights = weights_of_sequences(
                sequences[self._weighting.mask_key],
                self._weighting.spec,
                undivided_counts(),
                weight_dtype=self._options.weight_dtype,
            )
        self._vectors.append(count_local(list(sequences.values())).vector)
        self._main_masks.append(sequences[mask_keys[0]])
        self._weights.append(tuple(weights))

    def local_vector(self) -> Tensor:
        """This rank's counts, packed, int64 [VECTOR_LENGTH]; zeros before any microbatch."""
        if not self._vectors:
            return torch.zeros(VECTOR_LENGTH, dtype=torch.int64)
        return sum_local(self._vectors, self.fingerprint())

    def expected_weight_sums(self) -> Tensor:
        """The mode's checksum times N; float64, shape [1]. NaN for a mode without a checksum."""
        counts = self.counts_of(self._weighting.mask_key)
        divisor = self._weighting.spec.divisor(counts)
        checksum = self._weighting.spec.checksum(counts)
        assert divisor is not None  # refused when the step was planned
        return (divisor * torch.nan if checksum is None else checksum * divisor).reshape(1)

    def planned_weight_sums(self) -> Tensor:
        """The sum of this rank's weights u before any slicing, float64 [1]."""
        sums = [weights.sum(dtype=torch.float64) for [weights] in self._weights]
        return torch.stack(sums).sum().reshape(1) if sums else torch.zeros(1, dtype=torch.float64)

    def gradient_factor(self, *, divides_by_num_tokens: bool) -> float:
        """What is still to be multiplied onto finalized gradients: 1/N. Waits for the counts.

        T/N where Megatron has divided by T already (R3), and 1 for a batch without a token, whose
        gradient is 0 as it is.
        """
        divisor = self._weighting.spec.divisor(self.counts_of(self._weighting.mask_key))
        assert divisor is not None  # refused when the step was planned
        denominator = divisor.item()
        if denominator == 0:
            return 1.0
        # Finalize divides by nothing if T is 0.
        numerator = max(1, int(self.counts.num_tokens)) if divides_by_num_tokens else 1.0
        return numerator / denominator


def is_megatrons_own(weighting: Weighting, *, divides_by_num_tokens: bool) -> bool:
    """Whether Megatron's division by T is the mode's: token-mean of `loss_mask` in R3."""
    is_token_mean = weighting.spec.loss_agg_mode == "token-mean"
    return divides_by_num_tokens and is_token_mean and weighting.mask_key == MAIN_MASK


def sum_over_ranks(plan: StepWeights | None, groups: ParallelGroups) -> PendingCounts | None:
    """Counts of the global batch: an all-reduce over dp on tp rank 0, then a broadcast over tp.

    Every rank of the last pipeline stage calls it, also one without data. None: no rank counted
    anything, so no deferred step ran.

    Args:
        plan: the weights, on a rank with data; it takes over the counts.
        groups: the process groups.

    Returns:
        The counts, or None.

    Raises:
        LossAggError: on every rank, if one that should have had data has none, or ranks were
            configured differently.
    """
    vector = torch.zeros(VECTOR_LENGTH, dtype=torch.int64)
    if plan is not None:
        vector = plan.local_vector()
    vector = vector.to(communication_device(groups.dp_cp, vector.device))
    if groups.tp_rank == 0:
        all_reduce_sum(vector, groups.dp)
    broadcast_from_first(vector, groups.tp)
    pending = PendingCounts(vector, groups.dp if groups.tp_rank == 0 else None)
    if pending.num_ranks == 0:
        return None
    if pending.num_ranks != groups.dp_size:
        raise LossAggError(
            f"denominators='deferred': {pending.num_ranks} of {groups.dp_size} data-parallel "
            "ranks counted their microbatches. Every rank of the last pipeline stage (with tensor "
            "parallelism: its rank 0) gets its data through aggregator.wrap(...)."
        )
    pending.check(None if plan is None else plan.identity)
    if plan is not None:
        plan.set_counts(pending)
    return pending
