"""`Settings`: what a `LossAggregator` was built with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_lossagg.config.options import LossAggOptions
from megatron_lossagg.groups import ParallelGroups, current_groups
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.objective.evaluation import Evaluate
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.schedule.contract import ScheduleContract, regime_of
from megatron_lossagg.schedule.model_config import ConfigSource
from megatron_lossagg.weights.deferred import is_megatrons_own


@dataclass(frozen=True)
class Settings:
    """The arguments of a `LossAggregator`. What depends on the moment is asked anew each time.

    Attributes:
        options: see `LossAggOptions`.
        objective: terms and metrics.
        evaluate: what evaluates the objective on a microbatch.
        config_source: gives the model's config.
        groups: the process groups that were passed; None: Megatron's of the moment.
    """

    options: LossAggOptions
    objective: Objective
    evaluate: Evaluate
    config_source: ConfigSource
    groups: ParallelGroups | None

    @property
    def model_config(self) -> Any:
        """The model's config; raises LossAggError while it is not known."""
        return self.config_source.config

    @property
    def main_spec(self) -> ModeSpec:
        """The mode of the main mask."""
        return self.objective.weightings[0].spec

    @cached_property
    def is_deferred(self) -> bool:
        """Whether counts are known only when gradients are finalized."""
        return self.options.denominators == "deferred"

    def current_groups(self) -> ParallelGroups:
        """The groups that were passed, or Megatron's of this moment."""
        return current_groups(self.groups)

    def current_contract(self, groups: ParallelGroups | None = None) -> ScheduleContract:
        """The regime, read from the config as it is now; `groups`: those of now, if at hand."""
        return ScheduleContract.detect(
            self.model_config,
            self.current_groups() if groups is None else groups,
            returns=self.options.returns,
            cp_gradient=self.options.cp_gradient,
        )

    def divides_later(self, contract: ScheduleContract) -> bool:
        """Whether the plugin scales gradients when they are finalized."""
        main = self.objective.weightings[0]
        return self.is_deferred and not is_megatrons_own(
            main, divides_by_num_tokens=contract.weights_carry_num_tokens
        )

    @property
    def may_divide_later(self) -> bool:
        """`divides_later`, by the config's flag alone: process groups need not be there yet."""
        per_token = bool(self.model_config.calculate_per_token_loss)
        regime = regime_of(self.options.returns, per_token)
        main, divides = self.objective.weightings[0], regime.divides_by_num_tokens
        return self.is_deferred and not is_megatrons_own(main, divides_by_num_tokens=divides)
