"""The factors of `ScheduleFactors` one by one, each with its name: what `doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lossagg.schedule.factors import Regime, ScheduleFactors
from megatron_lossagg.schedule.options import CPGradient


@dataclass(frozen=True)
class NamedFactor:
    """One number that multiplies a loss or its gradient.

    Attributes:
        name: what it is; that of a member of `ScheduleFactors` where it is one's value.
        symbol: as in the table of `factors`, such as "1/M".
        value: the number; None if it depends on the data and is not known.
    """

    name: str
    symbol: str
    value: float | None


def factors_met(
    factors: ScheduleFactors, num_microbatches: int, num_tokens: int | None = None
) -> tuple[NamedFactor, ...]:
    """What a returned loss meets on its way to the gradient, in order.

    The sum in the backward of a gather is the model's and not among them. A factor that this regime
    does not have is left out; one that happens to be 1 is not.

    Args:
        factors: the regime and the sizes.
        num_microbatches: M.
        num_tokens: T, if it is known.

    Returns:
        The factors with their names.
    """
    regime, found = factors.regime, []
    if not regime.divides_by_num_tokens:
        if factors.schedule_multiplies_by_cp:
            found.append(NamedFactor("schedule_cp_factor", "C", factors.schedule_cp_factor))
        if regime is Regime.R2:
            found.append(NamedFactor("returned_num_tokens", "1/n", 1.0))
        mean = 1 / factors.undo_microbatch_mean(num_microbatches)
        found.append(NamedFactor("microbatch_mean", "1/M", mean))
    symbol = "1" if regime.uses_per_token_flag else "1/(D C)"
    found.append(NamedFactor("ddp_factor", symbol, factors.ddp_factor))
    if regime.divides_by_num_tokens:
        value = None if num_tokens is None else 1 / max(1, num_tokens)
        found.append(NamedFactor("global_num_tokens", "1/T", value))
    if factors.host_factor != 1:
        found.append(NamedFactor("host_factor", "H", float(factors.host_factor)))
    return tuple(found)


def factors_carried(
    factors: ScheduleFactors, num_microbatches: int, num_tokens: int | None = None
) -> tuple[NamedFactor, ...]:
    """What S is multiplied by: T by its weights (R3), and the factors of `loss_factor`.

    Args:
        factors: the regime and the sizes.
        num_microbatches: M.
        num_tokens: T, if it is known.

    Returns:
        The factors with their names.
    """
    regime, found = factors.regime, []
    if regime.divides_by_num_tokens:
        value = None if num_tokens is None else float(num_tokens)
        found.append(NamedFactor("weights_carry_num_tokens", "T", value))
    else:
        undo_mean = float(factors.undo_microbatch_mean(num_microbatches))
        found.append(NamedFactor("undo_microbatch_mean", "M", undo_mean))
        if not regime.uses_per_token_flag:
            found.append(NamedFactor("undo_rank_mean", "D C", float(factors.undo_rank_mean)))
        if factors.schedule_multiplies_by_cp:
            found.append(NamedFactor("undo_schedule_cp", "1/C", 1 / factors.schedule_cp_factor))
    if factors.cp_gradient is CPGradient.GATHERED:
        found.append(NamedFactor("undo_cp_gather", "1/C", factors.undo_cp_gather))
    if factors.host_factor != 1:
        found.append(NamedFactor("undo_host", "1/H", factors.undo_host))
    return tuple(found)
