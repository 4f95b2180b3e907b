"""`denominators="deferred"`: the global counts are known only when the batch is complete.

With streaming rollouts a step begins before its last sequence exists. Most modes are a weight that
is known from its own sequence, over one count of the global batch,

    w_st = u_s / N        u_s = 1, 1/n_s or 1/L        N = T, B or 1

so the loss can carry u and the gradient be divided by N once, at the end. Token-mean in regime R3
needs nothing: that is what Megatron does itself. In every other pairing the gradients of all model
chunks are scaled after `finalize_model_grads`, by 1/N, or T/N where Megatron divided by T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts import (
    VECTOR_LENGTH,
    GlobalCounts,
    PendingCounts,
    count_local,
    sum_local,
)
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import (
    ParallelGroups,
    all_reduce_sum,
    broadcast_from_first,
    broadcast_from_last,
    communication_device,
)
from megatron_lossagg.modes import ModeSpec, undivided_counts
from megatron_lossagg.plan import Microbatch, WeightOptions, check_microbatch, without_counting_keys
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.weights import weights_of_sequences


class DeferredPlan:
    """The weights u of microbatches as they come, and this rank's counts so far.

    Same interface as `WeightPlan`; the counts are there once `settle` has run.
    """

    def __init__(self, options: WeightOptions, num_microbatches: int) -> None:
        self._options = options
        [self._weighting] = options.weightings
        self._num_microbatches = num_microbatches
        self._vectors: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._pending: PendingCounts | None = None

    def __len__(self) -> int:
        return self._num_microbatches

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy with its weights u; counted the first time that `index` comes."""
        if index == len(self._weights):
            check_microbatch(microbatch, index, self._options)
            sequences = Sequences.of_microbatches([microbatch], self._weighting.mask_key)
            self._vectors.append(count_local([sequences]).vector)
            self._weights += weights_of_sequences(
                sequences,
                self._weighting.spec,
                undivided_counts(),
                weight_dtype=self._options.weight_dtype,
            )
        copy = without_counting_keys(microbatch)
        copy[self._options.weights_keys[0]] = self._weights[index]
        return copy

    def local_vector(self) -> Tensor:
        """This rank's counts, packed, int64 [VECTOR_LENGTH]."""
        return sum_local(self._vectors, self._options.fingerprint)

    def settle(self, pending: PendingCounts) -> None:
        """Take over the counts of the global batch."""
        self._pending = pending

    @property
    def counts(self) -> GlobalCounts:
        """Counts of the global batch. Raises LossAggError before the gradients are finalized."""
        if self._pending is None:
            raise LossAggError(
                "denominators='deferred': the counts of this step are known once "
                "finalize_model_grads_func has run."
            )
        return self._pending.wait()

    def check_counts(self) -> None:
        """Raise LossAggError if ranks were configured differently. Waits for the device."""
        if self._pending is not None:
            self._pending.check()

    def expected_weight_sums(self) -> Tensor | None:
        """The mode's checksum times N; float64, shape [1]. None while the counts are not known."""
        if self._pending is None:
            return None
        divisor = self._weighting.spec.divisor(self.counts)
        checksum = self._weighting.spec.checksum(self.counts)
        return None if checksum is None or divisor is None else (checksum * divisor).reshape(1)


def is_megatrons_own(spec: ModeSpec, regime: str) -> bool:
    """Whether Megatron's division by T is the mode's: token-mean in R3."""
    return regime == "R3" and spec.loss_agg_mode == "token-mean"


def sum_over_ranks(plan: DeferredPlan | None, groups: ParallelGroups) -> PendingCounts:
    """Counts of the global batch on every rank: all-reduce over dp, broadcasts over tp and pp.

    The all-reduce runs on tensor-parallel rank 0 of the last pipeline stage, where the data is;
    every rank calls this, also one without data.

    Raises:
        LossAggError: on every rank, if one that should have had data has none.
    """
    vector = torch.zeros(VECTOR_LENGTH, dtype=torch.int64)
    if plan is not None:
        vector = plan.local_vector()
    vector = vector.to(communication_device(groups.dp_cp, vector.device))
    if groups.is_last_stage:
        if groups.tp_rank == 0:
            all_reduce_sum(vector, groups.dp)
        broadcast_from_first(vector, groups.tp)
    broadcast_from_last(vector, groups.pp)
    pending = PendingCounts(vector, None, [])
    if pending.num_ranks != groups.dp_size:
        raise LossAggError(
            f"denominators='deferred': {pending.num_ranks} of {groups.dp_size} data-parallel "
            "ranks counted their microbatches. Every rank of the last pipeline stage (with tensor "
            "parallelism: its rank 0) gets its data through aggregator.wrap(...)."
        )
    pending.check()
    return pending


def gradient_factor(spec: ModeSpec, regime: str, counts: GlobalCounts) -> float:
    """What is still to be multiplied onto finalized gradients: 1/N, in R3 T/N. Waits for them.

    1 for a batch without a token, whose gradient is 0 as it is.
    """
    divisor = spec.divisor(counts)
    assert divisor is not None  # refused when the aggregator was built
    denominator = divisor.item()
    if denominator == 0:
        return 1.0
    numerator = counts.num_tokens.item() if regime == "R3" else 1.0
    return numerator / denominator
