"""What happens to a returned loss in a given setting, in numbers: what `doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.schedule.factors import Regime
from megatron_lossagg.schedule.named_factors import NamedFactor, factors_carried, factors_met

_SCHEDULE = "forward_step_calc_loss of pipeline_parallel.schedules"
_DDP = "DistributedDataParallel of distributed"
# Of each factor by its name: where in megatron.core it comes from, or what it undoes.
_ORIGINS = {
    "schedule_cp_factor": _SCHEDULE,
    "returned_num_tokens": f"{_SCHEDULE}; n is returned as 1",
    "microbatch_mean": _SCHEDULE,
    "global_num_tokens": "finalize_model_grads of distributed: over the sum of returned tokens",
    "host_factor": "the host",
    "weights_carry_num_tokens": "undoes 1/T of finalize",
    "undo_microbatch_mean": "undoes 1/M of the schedule",
    "undo_rank_mean": "undoes the mean of DDP",
    "undo_schedule_cp": "undoes C of the schedule",
    "undo_cp_gather": "undoes the sum in the backward of the gather",
    "undo_host": "undoes the host's factor",
}
_DDP_ORIGINS = {
    False: f"{_DDP}: a mean over D x C ranks",
    True: f"{_DDP}: a sum over D x C ranks with the flag on",
}


@dataclass(frozen=True)
class Factor(NamedFactor):
    """A `NamedFactor` with where it comes from, or what it is for."""

    origin: str


@dataclass(frozen=True)
class Mistake:
    """What a hand-written `loss_func` may do instead.

    Attributes:
        what: the mistake.
        ratio: the gradient over what it should be; None if it depends on the data.
        effect: what it does to a run.
    """

    what: str
    ratio: Fraction | None
    effect: str


@dataclass(frozen=True)
class Diagnosis:
    """The regime, the factors and the mistakes of one setting.

    Attributes:
        contract: the regime with D, C and the context-parallel convention.
        num_microbatches: M.
        returns: what `loss_func` gives the schedule.
        megatron: what Megatron does between the returned loss and the gradient.
        plugin: what the plugin multiplies the partial sum S of w * l by.
        checksum: sum of all weights of the global batch; None if the counts are not known.
        mistakes: what would go wrong without the plugin's factors.
    """

    contract: ScheduleContract
    num_microbatches: int
    returns: str
    megatron: tuple[Factor, ...]
    plugin: tuple[Factor, ...]
    checksum: float | None
    mistakes: tuple[Mistake, ...]


def diagnose(
    model_config: Any,
    groups: ParallelGroups,
    spec: ModeSpec,
    num_microbatches: int,
    *,
    returns: str = "auto",
    cp_gradient: str = "local",
    counts: GlobalCounts | None = None,
) -> Diagnosis:
    """Say what happens to a loss with this config and these groups. Does not communicate.

    Args:
        model_config: the model's `TransformerConfig`, or anything with its flags.
        groups: only their sizes are read.
        spec: the mode.
        num_microbatches: M.
        returns: of `LossAggregator`.
        cp_gradient: of `LossAggregator`.
        counts: of a global batch, for the checksum.

    Raises:
        LossAggError: the setting is refused, with the reason.
    """
    contract = ScheduleContract.detect(
        model_config, groups, returns=returns, cp_gradient=cp_gradient
    )
    num_tokens = None if counts is None else int(counts.num_tokens)
    checksum = None
    if counts is not None and not spec.needs_units:
        total = spec.checksum(counts)
        checksum = None if total is None else total.item()
    return Diagnosis(
        contract,
        num_microbatches,
        _RETURNS[contract.regime],
        _with_origins(contract, factors_met(contract, num_microbatches, num_tokens)),
        _with_origins(contract, factors_carried(contract, num_microbatches, num_tokens)),
        checksum,
        _mistakes(contract, num_microbatches),
    )


_RETURNS = {
    Regime.R1: "(loss, report)",
    Regime.R2: "(loss, 1, report)",
    Regime.R3: "(loss, number of valid tokens, report)",
    Regime.R4: "(loss, report)",
}


def _with_origins(
    contract: ScheduleContract, factors: tuple[NamedFactor, ...]
) -> tuple[Factor, ...]:
    origins = {**_ORIGINS, "ddp_factor": _DDP_ORIGINS[contract.regime.uses_per_token_flag]}
    return tuple(Factor(f.name, f.symbol, f.value, origins[f.name]) for f in factors)


def _mistakes(c: ScheduleContract, m: int) -> tuple[Mistake, ...]:
    found = []
    if c.regime.divides_by_num_tokens:
        found.append(
            Mistake(
                "return (S, n) though S has its own denominator",
                None,
                "divided by T once more: the step shrinks with the batch",
            )
        )
        found.append(
            Mistake(
                "count a token on every context-parallel rank",
                Fraction(1, c.cp_size),
                "the step shrinks with C",
            )
        )
    else:
        factor = Fraction(c.loss_factor(m)).limit_denominator(10**9)
        found.append(Mistake("return S as it is", 1 / factor, "Adam and gradient clipping hide it"))
        found.append(Mistake("forget M", Fraction(1, m), "the step changes with the batch's split"))
        if not c.regime.uses_per_token_flag:
            found.append(
                Mistake("forget D", Fraction(1, c.dp_size), "the step shrinks with every GPU added")
            )
        if c.schedule_multiplies_by_cp:
            found.append(
                Mistake(
                    "leave the schedule's C in",
                    Fraction(c.cp_size),
                    "the step grows with the context-parallel size",
                )
            )
        if c.regime is Regime.R1:
            found.append(
                Mistake(
                    "have calculate_per_token_loss turned on by someone",
                    Fraction(c.dp_size * c.cp_size),
                    "DDP sums then; returns='auto' follows the flag",
                )
            )
        found.append(
            Mistake(
                "log loss.detach() instead of a copy",
                None,
                f"rescaled in place: the log shows {c.schedule_factor(m):.4g} times the loss",
            )
        )
    found.append(
        Mistake(
            "divide each microbatch by its own count (mean of means)",
            None,
            "short microbatches weigh too much; wrong in every layout with more than one",
        )
    )
    return tuple(f for f in found if f.ratio != 1)
