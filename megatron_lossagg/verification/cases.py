"""What is verified: cases of a layout, a regime and a way to plan, and what becomes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lossagg.testing.batch.global_batch import GlobalBatch, ragged_batch
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan

# The defaults; R2 and R4 are what a host may force.
REGIMES = ("R1", "R3")
# (calculate_per_token_loss, returns) of each.
ALL_REGIMES = {
    "R1": (False, "loss"),
    "R2": (False, "loss_and_num_tokens"),
    "R3": (True, "loss_and_num_tokens"),
    "R4": (True, "loss"),
}
# float64 throughout; only in R3 Megatron multiplies gradients by a float32 reciprocal.
GRADIENT_BOUNDS = {"R1": 1e-12, "R2": 1e-12, "R3": 1e-6, "R4": 1e-12}
LOSS_BOUND = 1e-12
_USUAL = ("rows", "local")

DEFAULT_MODES: dict[str, AggregatorPlan] = {
    "token-mean": AggregatorPlan("token-mean"),
    "token-sum": AggregatorPlan("token-sum"),
    "seq-mean-token-sum": AggregatorPlan("seq-mean-token-sum"),
    "seq-mean-token-mean": AggregatorPlan("seq-mean-token-mean"),
    "seq-mean-token-sum-norm": AggregatorPlan("seq-mean-token-sum-norm", loss_scale_factor=7.5),
    "seq-mean-token-sum-norm/seq-mean": AggregatorPlan(
        "seq-mean-token-sum-norm", loss_scale_factor=7.5, norm_semantics="seq-mean"
    ),
}


@dataclass(frozen=True)
class Case:
    """A layout, a regime and a way to plan.

    Attributes:
        layout: sizes of the groups and microbatches per rank.
        regime: "R1" to "R4", see `schedule`.
        planning: "begin_step" or "wrap".
        data: "all", or "tp-rank-0": only there, and only on the first and last stage.
        form: of the microbatches: "rows", padded, or one of PACKED_FORMS.
        cp_gradient: one of CP_GRADIENTS, how token losses are made under context parallelism.
    """

    layout: Layout
    regime: str = "R1"
    planning: str = "begin_step"
    data: str = "all"
    form: str = "rows"
    cp_gradient: str = "local"

    def __str__(self) -> str:
        """Such as "C=2 D=2 M=2, R1, wrap, cu_seqlens, gathered"; rows and local go unsaid."""
        unusual = [value for value in (self.form, self.cp_gradient) if value not in _USUAL]
        return ", ".join([str(self.layout), self.regime, self.planning, *unusual])


@dataclass(frozen=True)
class ModeResult:
    """How far one mode is from the reference in one case.

    Attributes:
        gradient_error: relative L2 error of the whole model's gradient.
        loss_error: relative error of the reported J, the worst rank's.
    """

    mode: str
    gradient_error: float
    loss_error: float

    def passes(self, regime: str) -> bool:
        """Whether both errors are within the bounds of the regime (NaN is not)."""
        return self.gradient_error <= GRADIENT_BOUNDS[regime] and self.loss_error <= LOSS_BOUND


@dataclass(frozen=True)
class CaseResult:
    """All modes of one case."""

    case: Case
    modes: tuple[ModeResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every mode is within the bounds."""
        return all(mode.passes(self.case.regime) for mode in self.modes)


DEFAULT_LAYOUTS = tuple(
    (Layout.parse(text), data)
    for text, data in (
        ("D=1 M=1", "all"),
        ("D=4 M=4", "all"),
        ("TP=2 M=2", "all"),
        ("TP=2 PP=2 M=4", "tp-rank-0"),
        ("PP=2 D=2 M=4", "all"),
        ("PP=4 M=4", "all"),
        ("PP=2 VPP=2 M=4", "all"),
        ("C=2 D=2 M=2", "all"),
        ("C=4 M=2", "all"),
        ("PP=2 C=2 M=2", "all"),
        ("PP=2 VPP=2 C=2 M=4", "all"),
    )
)


def default_cases(
    layouts: Sequence[tuple[Layout, str]] = DEFAULT_LAYOUTS,
    regimes: Sequence[str] = REGIMES,
    plannings: Sequence[str] = ("begin_step", "wrap"),
    forms: Sequence[str] = ("rows",),
    cp_gradients: Sequence[str] = ("local",),
) -> list[Case]:
    """Every layout in every regime, planned in every way, and so on.

    The conventions of `cp_gradients` differ only where there is context parallelism: a layout
    without it is in the list once, as "local".
    """
    return [
        Case(layout, regime, planning, data, form, cp_gradient)
        for layout, data in layouts
        for regime in regimes
        for form in forms
        for cp_gradient in (cp_gradients if layout.cp > 1 else ("local",))
        for planning in plannings
    ]


def standard_batch(layout: Layout) -> GlobalBatch:
    """The ragged batch of a layout: 16 rows of width 16, or as many as the microbatches need.

    It has a fully masked sequence, an all-masked microbatch (where there is more than one), holes
    in masks and other token counts on every data-parallel rank.
    """
    num_microbatches = layout.dp * layout.num_microbatches
    num_rows = max(1, round(16 / num_microbatches)) * num_microbatches
    return ragged_batch(
        num_rows,
        dp=layout.dp,
        num_microbatches=layout.num_microbatches,
        extra_fields=("advantages", "old_log_probs"),
    )
