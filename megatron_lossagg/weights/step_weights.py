"""`StepWeights`: the weights of one step, whatever their counts come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.agreement import fingerprint
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.reduction import FINGERPRINT_BITS, NUM_HELD, PendingCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.weights.metrics import metric_divisors
from megatron_lossagg.weights.microbatch import (
    Microbatch,
    WeightOptions,
    carry_weights,
    tells_num_tokens,
    without_counting_keys,
)
from megatron_lossagg.weights.weighting import MAIN_MASK


class StepWeights(ABC):
    """The weights of this rank's microbatches, and the counts of the global batch behind them.

    Two kinds: `WeightPlan` counts the step before it runs, or is given the counts; `DeferredPlan`
    counts its microbatches as they come, and knows the global counts when gradients are finalized.

    Args:
        options: of the aggregator.
        mask_keys: the masks that are counted, the main one first.
        identity: by option what must be equal on all ranks, as text.

    Attributes:
        mask_keys: the masks that are counted, the main one first.
        counts_are_given: whether a driver gave the counts, so that none were reduced.
        weight_eps: machine epsilon of the weights' dtype.
    """

    counts_are_given = False

    def __init__(
        self, options: WeightOptions, mask_keys: tuple[str, ...], identity: Mapping[str, str]
    ) -> None:
        self._options = options
        self.mask_keys = mask_keys
        self.weight_eps = torch.finfo(options.weight_dtype).eps
        self._identity = identity
        self._pending: PendingCounts | None = None
        self._counts: dict[str, GlobalCounts] = {}
        self._divisors: Tensor | None = None

    @abstractmethod
    def __len__(self) -> int:
        """M, the microbatches of the step."""

    @abstractmethod
    def weights(self, index: int) -> tuple[Tensor, ...]:
        """The weights [b, s] of one microbatch, per weighting."""

    @abstractmethod
    def counted_mask(self, index: int) -> Tensor:
        """The main mask [b, s] of one microbatch, without rows that only pad the batch."""

    @abstractmethod
    def local_vector(self) -> Tensor:
        """This rank's counts, packed, int64 [VECTOR_LENGTH]."""

    @abstractmethod
    def expected_weight_sums(self) -> Tensor:
        """The sum of each weighting's weights over the global batch, float64 [num_weightings].

        NaN for a mode without a checksum: `planned_weight_sums`, summed over ranks, stands in.
        """

    @abstractmethod
    def gradient_factor(self, *, divides_by_num_tokens: bool) -> float:
        """What finalized gradients are still to be multiplied by. Waits for the counts."""

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy of a microbatch with weights `index`, without fields that only count."""
        copy = without_counting_keys(microbatch)
        if tells_num_tokens(microbatch, self._options):
            copy[MAIN_MASK] = self.counted_mask(index)
        carry_weights(copy, self.weights(index), self._options)
        return copy

    def planned_weight_sums(self) -> Tensor:
        """The sums of this rank's weights before any slicing, float64 [num_weightings]."""
        per_microbatch = [
            torch.stack([w.sum(dtype=torch.float64) for w in self.weights(index)])
            for index in range(len(self))
        ]
        return torch.stack(per_microbatch).sum(dim=0)

    def set_counts(self, pending: PendingCounts) -> None:
        """Take over the counts of the global batch."""
        self._pending = pending

    @property
    def counts_are_known(self) -> bool:
        """Whether `counts` can be asked for."""
        return self._pending is not None or self.counts_are_given

    @property
    def counts(self) -> GlobalCounts:
        """Counts of `loss_mask`; waits for the all-reduce that is under way.

        Of the first term's mask where the microbatches have no `loss_mask`, or where a driver gave
        counts without it.

        Raises:
            LossAggError: counts are deferred, and gradients were not finalized yet.
        """
        main, *others = self.mask_keys
        is_left_out = self.counts_are_given and main not in self._counts
        return self.counts_of(others[0] if is_left_out else main)

    def counts_of(self, mask_key: str) -> GlobalCounts:
        """Counts of a mask over the global batch. Raises as `counts`."""
        if mask_key not in self._counts:
            if self._pending is None:
                raise LossAggError(
                    "denominators='deferred': the counts of this step are known once "
                    "finalize_model_grads_func has run."
                )
            self._counts[mask_key] = self._pending.wait(self.mask_keys.index(mask_key))
        return self._counts[mask_key]

    def num_positions(self) -> Tensor:
        """Positions of the main masks of the global batch; -1 where a driver gave the counts."""
        if self._pending is None:
            return torch.full_like(self.counts.num_tokens, -1)
        return self._pending.num_positions

    def held_here(self) -> Tensor:
        """What this rank's microbatches hold, int64 [NUM_HELD], see `held_counts`."""
        return self.local_vector()[-NUM_HELD:]

    def given_here(self) -> Tensor:
        """1, x and x^2 of the counts x that a driver gave, float64 [3, NUM_HELD], 0 elsewhere."""
        return torch.zeros(3, NUM_HELD, dtype=torch.float64)

    @property
    def given_counts(self) -> Mapping[str, GlobalCounts]:
        """The counts that a driver gave, by mask."""
        return self._counts if self.counts_are_given else {}

    @property
    def metric_divisors(self) -> Tensor | None:
        """What metric sums are divided by, float64 [num_metric_sums]; None: none, or not known."""
        metrics = self._options.metrics
        if self._divisors is None and metrics and self.counts_are_known:
            with outside_inference_mode():
                self._divisors = metric_divisors(metrics, self.counts_of)
        return self._divisors

    def identity(self) -> dict[str, str]:
        """By option what must be equal on all ranks that take part in one step."""
        has_main_mask = self.mask_keys[0] == MAIN_MASK
        return {**self._identity, f"{MAIN_MASK!r} in the microbatches": str(has_main_mask)}

    def fingerprint(self) -> int:
        """A number that is equal on ranks whose `identity` is."""
        return fingerprint(self.identity(), FINGERPRINT_BITS)

    def check_counts(self) -> None:
        """Raise LossAggError if the counts cannot be right. Waits for the device.

        Where ranks were configured differently, which all of the data-parallel group see alike,
        they exchange their options over it.
        """
        if self._pending is not None:
            self._pending.check(self.identity)


def outside_inference_mode() -> AbstractContextManager[None]:
    """Tensors that are made in this context can be used in a graph later; nothing there has one."""
    if not torch.is_inference_mode_enabled():
        return _NO_CONTEXT  # entering a mode costs more than what is done for a microbatch
    return torch.inference_mode(False)


_NO_CONTEXT = nullcontext()
