"""Faults that real plugins had, planted to prove that `verify` and the tests see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from megatron_lossagg.counts.reduction import GlobalCounts, PendingCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.weights import plan as plan_module
from megatron_lossagg.weights.plan import WeightPlan
from megatron_lossagg.weights.token_weights import sequence_weights


def _factor_times(change: Callable[[ScheduleContract, int], float]) -> Any:
    """Patch: the factor of the returned loss is off by `change`."""
    original = ScheduleContract.loss_factor

    def loss_factor(self: ScheduleContract, num_microbatches: int) -> float:
        return original(self, num_microbatches) * change(self, num_microbatches)

    return mock.patch.object(ScheduleContract, "loss_factor", loss_factor)


def _mean_of_means() -> Any:
    """Patch: each microbatch divides by its own counts, and the means are averaged."""

    def weights(self: WeightPlan, index: int) -> tuple[Tensor, ...]:
        sequences = self._local.sequences[0]
        n_s = sequences.num_tokens.split(sequences.sizes)[index]
        own = GlobalCounts(n_s.sum(), (n_s > 0).sum(), n_s.new_tensor(len(n_s)))
        own_weights = sequence_weights(
            sequences,
            self._options.weightings[0].spec,
            own,
            weight_dtype=self._options.weight_dtype,
        ).spread(index)
        share = len(self) * self._pending.num_ranks  # type: ignore[union-attr]
        scale = self.counts.num_tokens if self._times_num_tokens else 1
        return (own_weights / share * scale,)

    return mock.patch.object(WeightPlan, "weights", weights)


def _counts_over_dp_cp() -> Any:
    """Patch: full masks are counted over data x context parallel ranks."""
    original = plan_module.start_reduction

    def start_reduction(local: Any, groups: ParallelGroups) -> PendingCounts:
        # A group of groups in which `dp` is what `dp_cp` is.
        return original(local, replace(groups, dp=groups.dp_cp, cp=None))

    return mock.patch.object(plan_module, "start_reduction", start_reduction)


def _counts_of_this_rank() -> Any:
    """Patch: the counts are not reduced at all."""
    original = plan_module.start_reduction

    def start_reduction(local: Any, groups: ParallelGroups) -> PendingCounts:
        return original(local, ParallelGroups.single_process())

    return mock.patch.object(plan_module, "start_reduction", start_reduction)


def _sequences_once_per_cp_rank() -> Any:
    """Patch: tokens are counted right, but each sequence once per context-parallel rank."""
    original = WeightPlan.counts_of

    def counts_of(self: WeightPlan, mask_key: str) -> GlobalCounts:
        from megatron.core import parallel_state

        found, cp_size = original(self, mask_key), parallel_state.get_context_parallel_world_size()
        return GlobalCounts(
            found.num_tokens, found.num_valid_seqs * cp_size, found.num_seqs * cp_size
        )

    return mock.patch.object(WeightPlan, "counts_of", counts_of)


_FAULTS: dict[str, Callable[[], Any]] = {
    "drop-num-microbatches": lambda: _factor_times(lambda c, m: 1.0 / m),
    "drop-dp-size": lambda: _factor_times(lambda c, m: 1.0 / c.dp_size),
    # The schedule's own x C is what cancels the C in DDP's mean; undoing it loses that.
    "drop-cp-size": lambda: _factor_times(lambda c, m: 1.0 / c.cp_size),
    "mean-of-means": _mean_of_means,
    "counts-over-dp-cp": _counts_over_dp_cp,
    "counts-of-this-rank": _counts_of_this_rank,
    "sequence-once-per-cp-rank": _sequences_once_per_cp_rank,
}


def fault_names() -> tuple[str, ...]:
    """The faults that `planted` knows."""
    return tuple(_FAULTS)


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run a block with a fault in the plugin of this process; None plants nothing.

    Args:
        name: one of `fault_names()`, or None.

    Yields:
        Nothing; the fault is there inside of the block.

    Raises:
        ValueError: an unknown fault.
    """
    if name is None:
        yield
        return
    if name not in _FAULTS:
        raise ValueError(f"Unknown fault {name!r}; expected one of {', '.join(_FAULTS)}.")
    with _FAULTS[name]():
        yield
