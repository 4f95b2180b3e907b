"""What a `LossAggregator` was built with, and what follows from it at the start of a step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.reduction import FINGERPRINT_BITS
from megatron_lossagg.groups import ParallelGroups, current_groups
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.objective.evaluation import Evaluate
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.schedule.contract import (
    ScheduleContract,
    check_options,
    regime_of,
)
from megatron_lossagg.schedule.model_config import ConfigSource
from megatron_lossagg.schedule.refusals import (
    refuse_deferred,
    uses_full_iteration_cuda_graph,
    uses_hybrid_cp,
)
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.typed_fields import check_flags
from megatron_lossagg.weights.deferred import is_megatrons_own
from megatron_lossagg.weights.microbatch import WeightOptions, check_weights_key
from megatron_lossagg.weights.token_weights import check_weight_dtype


@dataclass(frozen=True)
class Settings:
    """The arguments of `LossAggregator`, checked when built; see there for their meaning."""

    objective: Objective
    evaluate: Evaluate
    config_source: ConfigSource
    groups: ParallelGroups | None
    cp_gradient: str
    returns: str
    weights_key: str
    weight_dtype: torch.dtype
    masks_are_cp_sliced: bool
    contract: str
    denominators: str
    reports_counts: bool

    def __post_init__(self) -> None:
        check_weight_dtype(self.weight_dtype)
        check_weights_key(self.weights_key)
        check_flags(masks_are_cp_sliced=self.masks_are_cp_sliced, report_counts=self.reports_counts)
        check_options(
            returns=self.returns,
            cp_gradient=self.cp_gradient,
            contract=self.contract,
            denominators=self.denominators,
        )

    @cached_property
    def model_config(self) -> Any:
        """The model's config; raises LossAggError while it is not known."""
        return self.config_source.config

    @property
    def num_metric_sums(self) -> int:
        """How many metrics are sums."""
        return len(self.objective.metric_sums)

    @property
    def main_spec(self) -> ModeSpec:
        """The mode of the main mask."""
        return self.objective.weightings[0].spec

    def given_counts(self, counts: Any) -> dict[str, GlobalCounts] | None:
        """Counts that a caller passed, by mask.

        Raises:
            TypeError: something else. ValueError: a mask of a term without counts.
        """
        if counts is None:
            return None
        mask_keys = self.objective.mask_keys
        by_mask = {mask_keys[0]: counts} if isinstance(counts, GlobalCounts) else counts
        if not isinstance(by_mask, Mapping) or not all(
            isinstance(value, GlobalCounts) for value in by_mask.values()
        ):
            raise TypeError(
                "counts must be a GlobalCounts, or a mapping from mask_key to one, got "
                f"{_kind_of_counts(by_mask)}."
            )
        missing = [key for key in mask_keys if key not in by_mask]
        if missing:
            raise ValueError(
                f"counts lacks the mask(s) {', '.join(missing)}: pass {{mask_key: "
                "GlobalCounts(...)} for every mask that a term uses."
            )
        return dict(by_mask)

    @property
    def is_deferred(self) -> bool:
        """Whether counts are known only when gradients are finalized."""
        return self.denominators == "deferred"

    def current_groups(self) -> ParallelGroups:
        """The groups that were passed, or Megatron's of this moment."""
        return current_groups(self.groups)

    def current_contract(self) -> ScheduleContract:
        """The regime, read from the config as it is now."""
        return ScheduleContract.detect(
            self.model_config,
            self.current_groups(),
            returns=self.returns,
            cp_gradient=self.cp_gradient,
        )

    def divides_later(self, contract: ScheduleContract) -> bool:
        """Whether the plugin scales gradients when they are finalized."""
        main = self.objective.weightings[0]
        return self.is_deferred and not is_megatrons_own(main, contract.regime)

    @property
    def may_divide_later(self) -> bool:
        """`divides_later`, by the config's flag alone: process groups need not be there yet."""
        per_token = bool(self.model_config.calculate_per_token_loss)
        main = self.objective.weightings[0]
        return self.is_deferred and not is_megatrons_own(main, regime_of(self.returns, per_token))

    def step_context(
        self,
        iteration: int | None = None,
        *,
        forward_only: bool = False,
        pairs_by_tokens: bool | None = None,
    ) -> StepContext:
        """Groups, regime and coefficients of a step: none is remembered, so none can be stale.

        Args:
            iteration: at which coefficients are evaluated.
            forward_only: of `LossAggregator.wrap`.
            pairs_by_tokens: see `StepContext`; None: as the regime wants it for training.
        """
        return replace(
            self.receiving_context(forward_only=forward_only, pairs_by_tokens=pairs_by_tokens),
            coefficients=self.objective.coefficients(iteration),
        )

    def receiving_context(
        self, *, forward_only: bool = False, pairs_by_tokens: bool | None = None
    ) -> StepContext:
        """Of a rank that runs no step and only receives a report: no coefficient is evaluated."""
        contract = self.current_contract()
        replayed = uses_full_iteration_cuda_graph(self.model_config)
        if self.is_deferred:
            refuse_deferred(
                self.model_config,
                [weighting.spec for weighting in self.objective.weightings],
                normalisers=[metric.normaliser for metric in self.objective.metrics],
                divides_later=self.divides_later(contract),
                masks_are_cp_sliced=self.masks_are_cp_sliced,
            )
        return StepContext(
            objective=self.objective,
            evaluate=self.evaluate,
            coefficients=(),
            contract=contract,
            groups=self.current_groups(),
            weights_key=self.weights_key,
            weights_keys=self.objective.weights_keys(self.weights_key),
            reports_counts=self.reports_counts,
            plan_copies=1 if self.masks_are_cp_sliced else contract.cp_size,
            # A replayed CUDA graph does not enter Python; hybrid context parallelism calls once per
            # sample that it assigned to this rank.
            counts_loss_calls=not (replayed or uses_hybrid_cp(self.model_config)),
            sees_weights=not replayed,
            is_deferred=self.is_deferred,
            divides_later=self.divides_later(contract),
            forward_only=forward_only,
            pairs_by_tokens=(
                contract.weights_carry_num_tokens if pairs_by_tokens is None else pairs_by_tokens
            ),
        )

    def weight_options(self, context: StepContext) -> WeightOptions:
        """How the weights of a step are built and carried."""
        identity = (
            self.objective.identity,
            context.contract.regime,
            self.cp_gradient,
            self.weight_dtype,
            self.denominators,
            self.masks_are_cp_sliced,
            self.reports_counts,
            context.pairs_by_tokens,
        )
        return WeightOptions(
            weightings=self.objective.weightings,
            weights_keys=context.weights_keys,
            weight_dtype=self.weight_dtype,
            times_num_tokens=context.pairs_by_tokens and not self.is_deferred,
            masks_are_cp_sliced=self.masks_are_cp_sliced,
            # The lowest bit tells whether a batch has a loss_mask.
            fingerprint=zlib.crc32(repr(identity).encode()) >> (32 - FINGERPRINT_BITS),
            metrics=self.objective.metric_sums,
            keeps_mask=self.objective.keeps_mask(self.weights_key),
        )


def _kind_of_counts(counts: Any) -> str:
    if not isinstance(counts, Mapping):
        return type(counts).__name__
    wrong = {k: v for k, v in counts.items() if not isinstance(v, GlobalCounts)}
    kinds = ", ".join(f"{type(value).__name__} for {key!r}" for key, value in wrong.items())
    return f"{type(counts).__name__} with {kinds}"
