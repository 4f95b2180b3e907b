"""What happens to a returned loss in a given setting, in numbers: what `doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.schedule.contract import ScheduleContract

_SCHEDULE = "forward_step_calc_loss, megatron.core.pipeline_parallel.schedules"
_DDP = "DistributedDataParallel, megatron.core.distributed"
_FINALIZE = "finalize_model_grads, megatron.core.distributed"


@dataclass(frozen=True)
class Factor:
    """One number that multiplies a loss or its gradient.

    Attributes:
        symbol: as in the documentation, such as "1/M".
        value: the number; None if it depends on the data and is not known.
        origin: where it comes from, or what it is for.
    """

    symbol: str
    value: float | None
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
        _megatron(contract, num_microbatches, num_tokens),
        _plugin(contract, num_microbatches, num_tokens),
        checksum,
        _mistakes(contract, num_microbatches),
    )


_RETURNS = {
    "R1": "(loss, report)",
    "R2": "(loss, 1, report)",
    "R3": "(loss, number of valid tokens, report)",
    "R4": "(loss, report)",
}


def _megatron(c: ScheduleContract, m: int, num_tokens: int | None) -> tuple[Factor, ...]:
    factors = []
    if c.regime != "R3":
        if c.schedule_multiplies_by_cp:
            factors.append(Factor("C", c.cp_size, _SCHEDULE))
        if c.regime == "R2":
            factors.append(Factor("1/n", 1.0, f"{_SCHEDULE}; n is returned as 1"))
        factors.append(Factor("1/M", 1 / m, _SCHEDULE))
    if c.ddp_factor == 1:
        factors.append(Factor("1", 1.0, f"{_DDP}: a sum over D x C ranks with the flag on"))
    else:
        factors.append(Factor("1/(D C)", c.ddp_factor, f"{_DDP}: a mean over D x C ranks"))
    if c.regime == "R3":
        value = None if num_tokens is None else 1 / max(1, num_tokens)
        factors.append(Factor("1/T", value, f"{_FINALIZE}: over the sum of returned tokens"))
    return tuple(factors)


def _plugin(c: ScheduleContract, m: int, num_tokens: int | None) -> tuple[Factor, ...]:
    factors = []
    if c.regime == "R3":
        value = None if num_tokens is None else float(num_tokens)
        factors.append(Factor("T", value, "carried by the weights; undoes 1/T of finalize"))
    else:
        factors.append(Factor("M", float(m), "undoes 1/M of the schedule"))
        if c.ddp_factor != 1:
            factors.append(Factor("D C", float(c.dp_size * c.cp_size), "undoes the mean of DDP"))
        if c.schedule_multiplies_by_cp:
            factors.append(Factor("1/C", 1 / c.cp_size, "undoes C of the schedule"))
    if c.undo_cp_gather != 1:
        factors.append(
            Factor("1/C", c.undo_cp_gather, "undoes the sum in the backward of the gather")
        )
    return tuple(factors)


def _mistakes(c: ScheduleContract, m: int) -> tuple[Mistake, ...]:
    found = []
    if c.regime == "R3":
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
        if c.ddp_factor != 1:
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
        if c.regime == "R1":
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
