"""What the Megatron schedule, DDP and finalize do to a returned loss, and how to undo it.

S is this rank's and microbatch's partial sum of w * l, M the microbatches of the schedule call, D
the data-parallel and C the context-parallel size (read in `forward_step_calc_loss`,
`finalize_model_grads` and `DistributedDataParallel` of megatron-core 0.12 to 0.19), n the valid
tokens of this rank's part of the microbatch, and T the sum of all n:

    regime  values  calculate_per_token_loss  schedule  DDP            finalize  so return
    R1      2       False                     x C, / M  mean over D*C  -         S * M * D
    R2      3       False                     / n, / M  mean over D*C  -         S * M * D * C, 1
    R3      3       True                      -         sum over D*C   / T       S * T, n
    R4      2       True                      x C, / M  sum over D*C   -         S * M / C

In R2 megatron-core 0.12 also multiplies by C; `schedule_probe` asks the installed release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.schedule.probe import three_values_are_multiplied_by_cp
from megatron_lossagg.schedule.refusals import check_p2p_order, refuse_unproved

if TYPE_CHECKING:
    from megatron_lossagg.schedule.measure import Measurement

CP_GRADIENTS = ("local", "replicated-value", "gathered")
CONTRACTS = ("detect", "measure")
DENOMINATORS = ("counted", "deferred")
RETURNS = ("auto", "loss", "loss_and_num_tokens")
# Megatron sums num_tokens in int32.
MAX_NUM_TOKENS_R3 = 2**31 - 1


@dataclass(frozen=True)
class ScheduleContract:
    """The regime of a schedule and the factors that a returned loss must carry in it.

    Attributes:
        regime: "R1" to "R4", see the table of this module.
        dp_size: D.
        cp_size: C.
        cp_gradient: how token losses relate to context-parallel ranks: "local" (each rank has the
            losses of its chunk), "replicated-value" (every rank has all values, gradient only in
            its chunk), "gathered" (every rank has all values through a gather whose backward sums
            over the group).
        schedule_multiplies_by_cp: whether the schedule itself multiplies what is returned by C.
    """

    regime: str
    dp_size: int
    cp_size: int
    cp_gradient: str = "local"
    schedule_multiplies_by_cp: bool = True

    @classmethod
    def detect(
        cls,
        model_config: Any,
        groups: ParallelGroups,
        *,
        returns: str = "auto",
        cp_gradient: str = "local",
    ) -> ScheduleContract:
        """Read the regime from the model's `TransformerConfig`. Does not communicate.

        "auto" is R1 with `calculate_per_token_loss` off and R3 with it on; "loss" is R1 or R4,
        "loss_and_num_tokens" R2 or R3.

        Raises:
            ValueError: an unknown option.
            LossAggError: a configuration whose gradient would not be that of the global batch.
        """
        check_options(returns=returns, cp_gradient=cp_gradient)
        check_model_config(model_config)
        regime = regime_of(returns, bool(model_config.calculate_per_token_loss))
        refuse_unproved(model_config, regime, groups, cp_gradient == "local")
        check_p2p_order(model_config, groups.pp_size, groups.num_virtual_stages)
        multiplies_by_cp = True
        if regime == "R2" and groups.cp_size > 1:
            # Only a rank of the last stage can ask, and only there a loss is returned.
            multiplies_by_cp = groups.is_last_stage and three_values_are_multiplied_by_cp(
                groups.cp_size
            )
        return cls(regime, groups.dp_size, groups.cp_size, cp_gradient, multiplies_by_cp)

    @classmethod
    def measure(
        cls,
        model_config: Any,
        groups: ParallelGroups,
        *,
        returns: str = "auto",
        cp_gradient: str = "local",
        **options: Any,
    ) -> Measurement:
        """Communicates over all groups: drive a one-parameter model through the real schedule.

        See `measure.measure_schedule` for the options. Every rank must call it.

        Returns:
            The factor that a returned loss met on its way to the gradient, with the contract that
            `detect` gives, which it confirms.

        Raises:
            LossAggError: the measurement disagrees with `detect`: the schedule, DDP or finalize
                does something else.
        """
        from megatron_lossagg.schedule.measure import measure_schedule

        contract = cls.detect(model_config, groups, returns=returns, cp_gradient=cp_gradient)
        return measure_schedule(model_config, groups, contract, **options)

    @property
    def returns_num_tokens(self) -> bool:
        """Whether `loss_func` returns three values (R2, R3)."""
        return self.regime in ("R2", "R3")

    @property
    def weights_carry_num_tokens(self) -> bool:
        """Whether weights are T * w, since finalize divides by T (R3)."""
        return self.regime == "R3"

    @property
    def undo_cp_gather(self) -> float:
        """1/C if the backward of a gather sums over context-parallel ranks, else 1."""
        return 1.0 / self.cp_size if self.cp_gradient == "gathered" else 1.0

    @property
    def cp_copies(self) -> int:
        """On how many context-parallel ranks one token's value is present."""
        return 1 if self.cp_gradient == "local" else self.cp_size

    def schedule_factor(self, num_microbatches: int) -> float:
        """What the schedule multiplies the returned loss by: C / M, 1 / M or, in R3, 1."""
        if self.regime == "R3":
            return 1.0
        return (self.cp_size if self.schedule_multiplies_by_cp else 1) / num_microbatches

    @property
    def ddp_factor(self) -> float:
        """What DDP multiplies the sum of gradients by: 1/(D*C), or 1 with the per-token flag."""
        return 1.0 / (self.dp_size * self.cp_size) if self.regime in ("R1", "R2") else 1.0

    def loss_factor(self, num_microbatches: int) -> float:
        """The number that multiplies S (in R3: S * T) before it is returned.

        It undoes what the schedule and DDP will do, and the sum in the backward of a gather.
        """
        # M * D in R1; written so that integers stay exact.
        undo_microbatch_mean = 1 if self.regime == "R3" else num_microbatches
        undo_rank_mean = self.dp_size * self.cp_size if self.regime in ("R1", "R2") else 1
        schedule_cp_factor = (
            self.cp_size if self.regime != "R3" and self.schedule_multiplies_by_cp else 1
        )
        return undo_microbatch_mean * undo_rank_mean / schedule_cp_factor * self.undo_cp_gather


def regime_of(returns: str, per_token: bool) -> str:
    """The regime by what `loss_func` returns and by `calculate_per_token_loss`."""
    if returns == "auto":
        return "R3" if per_token else "R1"
    if returns == "loss":
        return "R4" if per_token else "R1"
    return "R3" if per_token else "R2"


def check_model_config(model_config: Any) -> None:
    """Raise TypeError unless the flag that decides the regime can be read from it."""
    if not hasattr(model_config, "calculate_per_token_loss"):
        raise TypeError(
            "model_config must be the model's TransformerConfig, got "
            f"{type(model_config).__name__} without calculate_per_token_loss. Pass "
            "get_model_config(model), the object that the schedule reads."
        )


def check_options(
    *,
    returns: str,
    cp_gradient: str,
    contract: str = "detect",
    denominators: str = "counted",
) -> None:
    """Raise ValueError on an unknown value of one of these options."""
    if denominators not in DENOMINATORS:
        raise ValueError(
            f"denominators={denominators!r} does not exist; expected one of "
            f"{', '.join(DENOMINATORS)}."
        )
    if contract not in CONTRACTS:
        raise ValueError(
            f"contract={contract!r} does not exist; expected one of {', '.join(CONTRACTS)}."
        )
    if returns not in RETURNS:
        raise ValueError(
            f"returns={returns!r} does not exist; expected one of {', '.join(RETURNS)}."
        )
    if cp_gradient not in CP_GRADIENTS:
        raise ValueError(
            f"cp_gradient={cp_gradient!r} does not exist; expected one of "
            f"{', '.join(CP_GRADIENTS)}."
        )
