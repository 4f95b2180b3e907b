"""What a `LossAggregator` was built with, and what follows from it at the start of a step."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lossagg.counts import FINGERPRINT_BITS
from megatron_lossagg.deferred import is_megatrons_own
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.plan import WeightOptions, check_weights_key
from megatron_lossagg.refusals import (
    refuse_deferred,
    uses_full_iteration_cuda_graph,
    uses_hybrid_cp,
)
from megatron_lossagg.schedule import ScheduleContract, check_model_config, check_options
from megatron_lossagg.step import LossFn, StepContext
from megatron_lossagg.weights import check_weight_dtype


@dataclass(frozen=True)
class Settings:
    """The arguments of `LossAggregator`, checked when built; see there for their meaning."""

    loss_fn: LossFn
    mode_spec: ModeSpec
    model_config: Any
    groups: ParallelGroups | None
    cp_gradient: str
    returns: str
    weights_key: str
    weight_dtype: torch.dtype
    masks_are_cp_sliced: bool
    contract: str
    denominators: str

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn must be callable, got {type(self.loss_fn).__name__}.")
        check_weight_dtype(self.weight_dtype)
        check_weights_key(self.weights_key)
        check_model_config(self.model_config)
        check_options(
            returns=self.returns,
            cp_gradient=self.cp_gradient,
            contract=self.contract,
            denominators=self.denominators,
        )

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
        return self.is_deferred and not is_megatrons_own(self.mode_spec, contract.regime)

    def step_context(self) -> StepContext:
        """Groups and regime for a step: neither is remembered, so neither can be stale."""
        contract = self.current_contract()
        replayed = uses_full_iteration_cuda_graph(self.model_config)
        if self.is_deferred:
            refuse_deferred(
                self.model_config,
                self.mode_spec,
                divides_later=self.divides_later(contract),
                masks_are_cp_sliced=self.masks_are_cp_sliced,
            )
        return StepContext(
            loss_fn=self.loss_fn,
            contract=contract,
            groups=self.current_groups(),
            weights_key=self.weights_key,
            # A replayed CUDA graph does not enter Python; hybrid context parallelism calls once per
            # sample that it assigned to this rank.
            counts_loss_calls=not (replayed or uses_hybrid_cp(self.model_config)),
            sees_weights=not replayed,
            divides_later=self.divides_later(contract),
        )

    def weight_options(self, contract: ScheduleContract) -> WeightOptions:
        """How the weights of a step are built and carried."""
        identity = (
            self.mode_spec,
            contract.regime,
            self.cp_gradient,
            self.weight_dtype,
            self.denominators,
        )
        return WeightOptions(
            spec=self.mode_spec,
            weights_key=self.weights_key,
            weight_dtype=self.weight_dtype,
            times_num_tokens=contract.weights_carry_num_tokens and not self.is_deferred,
            masks_are_cp_sliced=self.masks_are_cp_sliced,
            fingerprint=zlib.crc32(repr(identity).encode()) >> (32 - FINGERPRINT_BITS),
        )
