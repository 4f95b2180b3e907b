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

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import (
    VECTOR_LENGTH,
    GlobalCounts,
    PendingCounts,
    count_local,
    sum_local,
)
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import (
    ParallelGroups,
    all_reduce_sum,
    broadcast_from_first,
    communication_device,
)
from megatron_lossagg.modes import undivided_counts
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
from megatron_lossagg.weights.plan import outside_inference_mode
from megatron_lossagg.weights.token_weights import weights_of_sequences
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting


class DeferredPlan:
    """The weights u of microbatches as they come, and this rank's counts so far.

    Same interface as `WeightPlan`; the counts are there once `set_counts` has run.
    """

    def __init__(self, options: WeightOptions, num_microbatches: int) -> None:
        self._options = options
        [self._weighting] = options.weightings
        self._num_microbatches = num_microbatches
        self._vectors: list[Tensor] = []
        self._main_masks: list[Sequences] = []
        self._weights: list[Tensor] = []
        self._pending: PendingCounts | None = None
        self.mask_keys: tuple[str, ...] = options.mask_keys

    def __len__(self) -> int:
        return self._num_microbatches

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy with its weights u; counted the first time that `index` comes."""
        if index == len(self._weights):
            self._count(microbatch, index)
        copy = without_counting_keys(microbatch)
        if tells_num_tokens(microbatch, self._options):
            copy[MAIN_MASK] = self._main_masks[index].counted_mask(0)
        carry_weights(copy, [self._weights[index]], self._options)
        return copy

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
            [weights] = weights_of_sequences(
                sequences[self._weighting.mask_key],
                self._weighting.spec,
                undivided_counts(),
                weight_dtype=self._options.weight_dtype,
            )
        self._vectors.append(count_local(list(sequences.values())).vector)
        self._main_masks.append(sequences[mask_keys[0]])
        self._weights.append(weights)

    def local_vector(self) -> Tensor:
        """This rank's counts, packed, int64 [VECTOR_LENGTH]; zeros before any microbatch."""
        if not self._vectors:
            return torch.zeros(VECTOR_LENGTH, dtype=torch.int64)
        return sum_local(self._vectors, fingerprint_of_step(self._options, self.mask_keys))

    def set_counts(self, pending: PendingCounts) -> None:
        """Take over the counts of the global batch."""
        self._pending = pending

    @property
    def counts_are_known(self) -> bool:
        """Whether gradients have been finalized, and counts with them."""
        return self._pending is not None

    @property
    def counts(self) -> GlobalCounts:
        """Counts of the main mask. Raises LossAggError before the gradients are finalized."""
        return self.counts_of(self.mask_keys[0])

    def counts_of(self, mask_key: str) -> GlobalCounts:
        """Counts of a mask over the global batch. Raises as `counts`."""
        return self._known().wait(self.mask_keys.index(mask_key))

    def num_positions(self) -> Tensor:
        """Positions of the main masks of the global batch."""
        return self._known().num_positions

    def _known(self) -> PendingCounts:
        if self._pending is None:
            raise LossAggError(
                "denominators='deferred': the counts of this step are known once "
                "finalize_model_grads_func has run."
            )
        return self._pending

    @property
    def weight_eps(self) -> float:
        """Machine epsilon of the weights' dtype."""
        return torch.finfo(self._options.weight_dtype).eps

    def check_counts(self) -> None:
        """Raise LossAggError if ranks were configured differently. Waits for the device."""
        if self._pending is not None:
            self._pending.check()

    @cached_property
    def _metric_divisors(self) -> Tensor | None:
        metrics = self._options.metrics
        return metric_divisors(metrics, self.counts_of) if metrics else None

    @property
    def metric_divisors(self) -> Tensor | None:
        """What metric sums are divided by; None if there are none, or it is not known yet."""
        return self._metric_divisors if self.counts_are_known else None

    def expected_weight_sums(self) -> Tensor | None:
        """The mode's checksum times N; float64, shape [1]. None while the counts are not known."""
        if self._pending is None:
            return None
        counts = self.counts_of(self._weighting.mask_key)
        divisor = self._weighting.spec.divisor(counts)
        checksum = self._weighting.spec.checksum(counts)
        return None if checksum is None or divisor is None else (checksum * divisor).reshape(1)

    def gradient_factor(self, regime: str) -> float:
        """What is still to be multiplied onto finalized gradients: 1/N, in R3 T/N. Waits for them.

        1 for a batch without a token, whose gradient is 0 as it is.
        """
        divisor = self._weighting.spec.divisor(self.counts_of(self._weighting.mask_key))
        assert divisor is not None  # refused when the step was planned
        denominator = divisor.item()
        if denominator == 0:
            return 1.0
        # Finalize divides by nothing if T is 0.
        numerator = max(1, int(self.counts.num_tokens)) if regime == "R3" else 1.0
        return numerator / denominator


def is_megatrons_own(weighting: Weighting, regime: str) -> bool:
    """Whether Megatron's division by T is the mode's: token-mean of `loss_mask` in R3."""
    is_token_mean = weighting.spec.loss_agg_mode == "token-mean"
    return regime == "R3" and is_token_mean and weighting.mask_key == MAIN_MASK


def sum_over_ranks(plan: DeferredPlan | None, groups: ParallelGroups) -> PendingCounts | None:
    """Counts of the global batch: an all-reduce over dp on tp rank 0, then a broadcast over tp.

    Every rank of the last pipeline stage calls it, also one without data. None: no rank counted
    anything, so no deferred step ran.

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
    pending = PendingCounts(vector, None, [])
    if pending.num_ranks == 0:
        return None
    if pending.num_ranks != groups.dp_size:
        raise LossAggError(
            f"denominators='deferred': {pending.num_ranks} of {groups.dp_size} data-parallel "
            "ranks counted their microbatches. Every rank of the last pipeline stage (with tensor "
            "parallelism: its rank 0) gets its data through aggregator.wrap(...)."
        )
    pending.check()
    return pending


class DeferredDivision:
    """Divides the gradients of all pipeline stages by what the last one counted.

    It belongs to a model's config, not to an aggregator: stages before the last one cannot know
    whose step runs, so whenever gradients are finalized they learn the factor, which is 1 unless
    a deferred step ran.

    Args:
        groups: gives the process groups of the moment.
    """

    def __init__(self, groups: Callable[[], ParallelGroups]) -> None:
        self._groups = groups

    def __call__(self, chunks: list[Any], factor_here: Callable[[], float] | None) -> None:
        """Multiply the gradients of `chunks`: one all-reduce of 3 numbers over pp.

        Args:
            chunks: model chunks of this rank.
            factor_here: on the last stage, where a deferred step ran, counts and gives the factor.

        Raises:
            LossAggError: on every stage, if the last one could not count or a stage did not come.
        """
        groups = self._groups()
        problem: Exception | None = None
        factor, has_failed = 0.0, 0.0
        if groups.is_last_stage:
            factor = 1.0
            try:
                if factor_here is not None:
                    factor = factor_here()
                else:
                    sum_over_ranks(None, groups)
            except Exception as error:  # raised below: earlier stages wait for this one
                problem, has_failed = error, 1.0
        totals = torch.tensor([factor, has_failed, 1.0], dtype=torch.float64)
        totals = totals.to(communication_device(groups.pp, totals.device))
        all_reduce_sum(totals, groups.pp)
        factor, has_failed, num_stages = totals.tolist()
        if problem is not None:
            raise problem
        if has_failed or num_stages != groups.pp_size:
            raise LossAggError(
                "denominators='deferred': the last pipeline stage could not count the step; its "
                "message says why. Gradients are not divided: do not step the optimizer."
            )
        if factor != 1.0:
            for chunk in chunks:
                chunk.scale_gradients(factor)
