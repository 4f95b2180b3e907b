"""What a Megatron schedule does to a returned loss, and what undoes it: arithmetic on integers.

S is this rank's and microbatch's partial sum of w * l, M the microbatches of the schedule call, D
the data-parallel and C the context-parallel size, n the valid tokens of this rank's part of the
microbatch, and T the sum of all n. Read in `forward_step_calc_loss`, `finalize_model_grads` and
`DistributedDataParallel` of megatron-core 0.12 to 0.19:

    regime  values  calculate_per_token_loss  schedule  DDP            finalize  so return
    R1      2       False                     x C, / M  mean over D*C  -         S * M * D
    R2      3       False                     / n, / M  mean over D*C  -         S * M * D * C, 1
    R3      3       True                      -         sum over D*C   / T       S * T, n
    R4      2       True                      x C, / M  sum over D*C   -         S * M / C

In R2 megatron-core 0.12 also multiplies by C; `probe` asks the installed release.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational

from megatron_lossagg.schedule.options import CPGradient, Returns
from megatron_lossagg.words import Word, read_option

# Megatron sums num_tokens in int32.
MAX_NUM_TOKENS_R3 = 2**31 - 1


class Regime(Word):
    """A row of the table above; it compares and prints as its name."""

    R1 = "R1"
    R2 = "R2"
    R3 = "R3"
    R4 = "R4"

    @property
    def returns_num_tokens(self) -> bool:
        """Whether `loss_func` returns three values."""
        return self in (Regime.R2, Regime.R3)

    @property
    def uses_per_token_flag(self) -> bool:
        """Whether `calculate_per_token_loss` is on, so that DDP sums instead of averaging."""
        return self in (Regime.R3, Regime.R4)

    @property
    def divides_by_num_tokens(self) -> bool:
        """Whether finalize divides gradients by T, and the schedule scales nothing."""
        return self is Regime.R3


def regime_of(returns: str, per_token: bool) -> Regime:
    """The regime by what `loss_func` returns (see `Returns`) and by `calculate_per_token_loss`."""
    kind = returns if isinstance(returns, Returns) else read_option(Returns, "returns", returns)
    if kind is Returns.AUTO:
        return Regime.R3 if per_token else Regime.R1
    if kind is Returns.LOSS:
        return Regime.R4 if per_token else Regime.R1
    return Regime.R3 if per_token else Regime.R2


@dataclass(frozen=True)
class ScheduleFactors:
    """The factors that meet a returned loss, and those that it must carry to undo them.

    Attributes:
        regime: a `Regime` or its name.
        dp_size: D.
        cp_size: C.
        cp_gradient: a `CPGradient` or its string.
        schedule_multiplies_by_cp: whether the schedule itself multiplies what is returned by C;
            in R3 it multiplies by nothing, whatever this says.
        host_factor: what a host multiplies the returned loss or its gradient by besides Megatron,
            an exact fraction: 1/4 for a trainer that divides by its 4 accumulated schedule calls.
            `loss_factor` undoes it as it undoes the schedule; the factors of Megatron
            (`schedule_factor`, `ddp_factor`) do not hold it.

    Raises:
        ValueError: an unknown regime or convention, or a host factor that is not positive.
    """

    regime: Regime
    dp_size: int
    cp_size: int
    cp_gradient: CPGradient = CPGradient.LOCAL
    schedule_multiplies_by_cp: bool = True
    host_factor: Fraction | int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.regime, Regime):
            object.__setattr__(self, "regime", read_option(Regime, "regime", self.regime))
        if not isinstance(self.cp_gradient, CPGradient):
            convention = read_option(CPGradient, "cp_gradient", self.cp_gradient)
            object.__setattr__(self, "cp_gradient", convention)
        if not isinstance(self.host_factor, Rational) or self.host_factor <= 0:
            raise ValueError(
                f"host_factor must be a positive Fraction or int, got {self.host_factor!r} of type "
                f"{type(self.host_factor).__name__}: it is undone exactly, so pass Fraction(1, 4) "
                "where 0.25 is meant."
            )

    @property
    def returns_num_tokens(self) -> bool:
        """Whether `loss_func` returns three values (R2, R3)."""
        return self.regime.returns_num_tokens

    @property
    def weights_carry_num_tokens(self) -> bool:
        """Whether weights are T * w, since finalize divides by T (R3)."""
        return self.regime.divides_by_num_tokens

    @property
    def cp_copies(self) -> int:
        """On how many context-parallel ranks one token's value is present."""
        return 1 if self.cp_gradient is CPGradient.LOCAL else self.cp_size

    # What happens to a returned loss.

    @property
    def schedule_cp_factor(self) -> int:
        """C where the schedule multiplies by it, else 1."""
        multiplies = self.schedule_multiplies_by_cp and not self.regime.divides_by_num_tokens
        return self.cp_size if multiplies else 1

    def schedule_factor(self, num_microbatches: int) -> float:
        """What the schedule multiplies the returned loss by: C / M, 1 / M or, in R3, 1."""
        return self.schedule_cp_factor / self.undo_microbatch_mean(num_microbatches)

    @property
    def ddp_factor(self) -> float:
        """What DDP multiplies the sum of gradients by: 1/(D*C), or 1 with the per-token flag."""
        return 1.0 / self.undo_rank_mean

    # What undoes it.

    def undo_microbatch_mean(self, num_microbatches: int) -> int:
        """M, against the schedule's mean over microbatches; 1 in R3, which has none."""
        return 1 if self.regime.divides_by_num_tokens else num_microbatches

    @property
    def undo_rank_mean(self) -> int:
        """D * C, against the mean of DDP; 1 with the per-token flag, where DDP sums."""
        return 1 if self.regime.uses_per_token_flag else self.dp_size * self.cp_size

    @property
    def undo_cp_gather(self) -> float:
        """1/C if the backward of a gather sums over context-parallel ranks, else 1."""
        return 1.0 / self.cp_size if self.cp_gradient is CPGradient.GATHERED else 1.0

    @property
    def undo_host(self) -> float:
        """1 / `host_factor`."""
        return self.host_factor.denominator / self.host_factor.numerator

    def loss_factor(self, num_microbatches: int) -> float:
        """The number that multiplies S (in R3: S * T) before it is returned.

        It undoes what the schedule, DDP and the host will do, and the sum in the backward of a
        gather.
        """
        # Means before the division by C, so that integers stay exact.
        undo_means = self.undo_microbatch_mean(num_microbatches) * self.undo_rank_mean
        return undo_means / self.schedule_cp_factor * self.undo_cp_gather * self.undo_host
