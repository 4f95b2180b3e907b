"""The regime of a model's config and of its groups: read (`detect`) or measured (`measure`).

The arithmetic of the regimes is in `factors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.schedule.factors import Regime, ScheduleFactors, regime_of
from megatron_lossagg.schedule.measure import Measurement, measure_schedule
from megatron_lossagg.schedule.model_config import check_model_config
from megatron_lossagg.schedule.options import CPGradient, Returns
from megatron_lossagg.schedule.probe import three_values_are_multiplied_by_cp
from megatron_lossagg.schedule.refusals import check_p2p_order, refuse_unproved


@dataclass(frozen=True)
class ScheduleContract(ScheduleFactors):
    """`ScheduleFactors` that belong to a model's config and to process groups."""

    @classmethod
    def detect(
        cls,
        model_config: Any,
        groups: ParallelGroups,
        *,
        returns: str = Returns.AUTO,
        cp_gradient: str = CPGradient.LOCAL,
        host_factor: Fraction | int = 1,
    ) -> ScheduleContract:
        """Read the regime from the model's `TransformerConfig`. Does not communicate.

        "auto" is R1 with `calculate_per_token_loss` off and R3 with it on; "loss" is R1 or R4,
        "loss_and_num_tokens" R2 or R3.

        Args:
            model_config: the model's `TransformerConfig`.
            groups: the process groups, whose sizes are D and C.
            returns: what `loss_func` returns, see `Returns`.
            cp_gradient: see `CPGradient`.
            host_factor: see `ScheduleFactors`.

        Returns:
            The contract.

        Raises:
            ValueError: an unknown option.
            LossAggError: a configuration whose gradient would not be that of the global batch.
        """
        check_model_config(model_config)
        regime = regime_of(returns, bool(model_config.calculate_per_token_loss))
        contract = cls(
            regime,
            groups.dp_size,
            groups.cp_size,
            cp_gradient,  # type: ignore[arg-type]  # its string will do
            host_factor=host_factor,
        )
        refuse_unproved(model_config, contract)
        check_p2p_order(model_config, groups.pp_size, groups.num_virtual_stages)
        if regime is Regime.R2 and groups.cp_size > 1:
            # Only a rank of the last stage can ask, and only there a loss is returned.
            multiplies_by_cp = groups.is_last_stage and three_values_are_multiplied_by_cp(
                groups.cp_size
            )
            return replace(contract, schedule_multiplies_by_cp=multiplies_by_cp)
        return contract

    @classmethod
    def measure(
        cls,
        model_config: Any,
        groups: ParallelGroups,
        *,
        returns: str = Returns.AUTO,
        cp_gradient: str = CPGradient.LOCAL,
        host_factor: Fraction | int = 1,
        **options: Any,
    ) -> Measurement:
        """Communicates over all groups: drive a one-parameter model through the real schedule.

        See `measure.measure_schedule` for the options. Every rank must call it. A `host_factor`
        must be applied by what is measured: the schedule, DDP or `finalize_model_grads_func`.

        Args:
            model_config: as for `detect`.
            groups: as for `detect`.
            returns: as for `detect`.
            cp_gradient: as for `detect`.
            host_factor: as for `detect`.
            **options: of `measure.measure_schedule`.

        Returns:
            The factor that a returned loss met on its way to the gradient, with the contract that
            `detect` gives, which it confirms.

        Raises:
            LossAggError: the measurement disagrees with `detect`: the schedule, DDP or finalize
                does something else.
        """
        contract = cls.detect(
            model_config,
            groups,
            returns=returns,
            cp_gradient=cp_gradient,
            host_factor=host_factor,
        )
        return measure_schedule(model_config, groups, contract, **options)
