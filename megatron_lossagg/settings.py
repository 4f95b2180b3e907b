"""What a `LossAggregator` was built with, and what follows from it at the start of a step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lossagg.counts import FINGERPRINT_BITS
from megatron_lossagg.deferred import is_megatrons_own
from megatron_lossagg.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.objective import Objective
from megatron_lossagg.plan import WeightOptions, check_weights_key
from megatron_lossagg.refusals import (
    refuse_deferred,
    uses_full_iteration_cuda_graph,
    uses_hybrid_cp,
)
from megatron_lossagg.schedule import ScheduleContract, check_model_config, check_options
from megatron_lossagg.step_context import StepContext
from megatron_lossagg.typed_fields import check_flags
from megatron_lossagg.weights import check_weight_dtype


@dataclass(frozen=True)
class Settings:
    """The arguments of `LossAggregator`, checked when built; see there for their meaning."""

    objective: Objective
    model_config: Any
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
        check_model_config(self.model_config)
        check_flags(masks_are_cp_sliced=self.masks_are_cp_sliced, report_counts=self.reports_counts)
        check_options(
            returns=self.returns,
            cp_gradient=self.cp_gradient,
            contract=self.contract,
            denominators=self.denominators,
        )

    @property
    def main_spec(self) -> ModeSpec:
        """The mode of the main mask."""
        return self.objective.weightings[0].spec

    def given_counts(self, counts: Any) -> dict[str, GlobalCounts] | None:
        """Counts that a caller passed, by mask.

        Raises:
            TypeError: something else. ValueError: a mask without counts.
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
                f"{type(counts).__name__}."
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
        return ParallelGroups.from_megatron() if self.groups is None else self.groups

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
        return self.is_deferred and not is_megatrons_own(self.main_spec, contract.regime)

    def step_context(self, iteration: int | None = None) -> StepContext:
        """Groups, regime and coefficients of a step: none is remembered, so none can be stale."""
        contract = self.current_contract()
        replayed = uses_full_iteration_cuda_graph(self.model_config)
        if self.is_deferred:
            refuse_deferred(
                self.model_config,
                [weighting.spec for weighting in self.objective.weightings],
                divides_later=self.divides_later(contract),
                masks_are_cp_sliced=self.masks_are_cp_sliced,
            )
        return StepContext(
            objective=self.objective,
            coefficients=self.objective.coefficients(iteration),
            contract=contract,
            groups=self.current_groups(),
            weights_keys=self.objective.weights_keys(self.weights_key),
            reports_counts=self.reports_counts,
            plan_copies=1 if self.masks_are_cp_sliced else contract.cp_size,
            # A replayed CUDA graph does not enter Python; hybrid context parallelism calls once per
            # sample that it assigned to this rank.
            counts_loss_calls=not (replayed or uses_hybrid_cp(self.model_config)),
            sees_weights=not replayed,
            divides_later=self.divides_later(contract),
        )

    def weight_options(self, contract: ScheduleContract) -> WeightOptions:
        """How the weights of a step are built and carried."""
        identity = (
            self.objective.identity,
            contract.regime,
            self.cp_gradient,
            self.weight_dtype,
            self.denominators,
            self.masks_are_cp_sliced,
            self.reports_counts,
        )
        return WeightOptions(
            weightings=self.objective.weightings,
            weights_keys=self.objective.weights_keys(self.weights_key),
            weight_dtype=self.weight_dtype,
            times_num_tokens=contract.weights_carry_num_tokens and not self.is_deferred,
            masks_are_cp_sliced=self.masks_are_cp_sliced,
            fingerprint=zlib.crc32(repr(identity).encode()) >> (32 - FINGERPRINT_BITS),
        )
