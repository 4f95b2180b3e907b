"""Compare the plugin with a one-process reference: whole-model gradients and reported losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_lossagg.testing.batch.global_batch import GlobalBatch, ragged_batch
from megatron_lossagg.testing.batch.packed_batch import pack_batch
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.ranks.rank_pool import RankPool
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg.testing.run import run_global_batch
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan, policy_gradient_losses

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


# GlobalBatch.assignment -> (loss, gradients) of every mode.
References = dict[Any, list[tuple[float, dict[str, Tensor]]]]

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


def run_cases(
    pool: RankPool,
    cases: Sequence[Case],
    modes: dict[str, AggregatorPlan] | None = None,
    *,
    fault: str | None = None,
    gpt: TinyGPT | None = None,
    references: References | None = None,
) -> Iterator[CaseResult]:
    """Run every mode of every case on the pool's ranks, yielding results as they come.

    Args:
        pool: at least as many ranks as the largest layout.
        cases: what to run.
        modes: label -> plan; `planning`, `data`, `returns` and `cp_gradient` come from the case.
        fault: a fault to plant in the plugin (see `faults`); its own checks are then left out, so
            that the comparison alone must find it.
        gpt: the model.
        references: what the reference gave in an earlier call with these modes and this model, and
            where this call adds its own; reading one costs less than regrouping the ranks.
    """
    modes = DEFAULT_MODES if modes is None else modes
    gpt = TinyGPT() if gpt is None else gpt
    references = {} if references is None else references
    for case in cases:
        batch = standard_batch(case.layout)
        if batch.assignment not in references:
            [references[batch.assignment]] = pool.run(
                references_on_rank, gpt, batch, list(modes.values()), world_size=1
            )
        plans = [
            replace(
                plan,
                planning=case.planning,
                data=case.data,
                cp_gradient=case.cp_gradient,
                returns=ALL_REGIMES[case.regime][1],
                fault=fault,
                validate=fault is None,
            )
            for plan in modes.values()
        ]
        on_ranks = pool.run(
            case_on_rank, gpt, batch, case, plans, world_size=case.layout.world_size
        )
        results = []
        for index, label in enumerate(modes):
            loss, gradients = references[batch.assignment][index]
            reported = [r[index][1]["loss"] for r in on_ranks if "loss" in r[index][1]]
            results.append(
                ModeResult(
                    label,
                    relative_error(on_ranks[0][index][0], gradients),
                    max(_scalar_error(value, loss) for value in reported),
                )
            )
        yield CaseResult(case, tuple(results))


def case_on_rank(
    gpt: TinyGPT, batch: GlobalBatch, case: Case, plans: Sequence[AggregatorPlan]
) -> list[tuple[dict[str, Tensor] | None, dict[str, float]]]:
    """On each rank: (whole-model gradient on rank 0, report) of every plan. Communicates."""
    data = batch if case.form == "rows" else pack_batch(batch, case.layout, case.form)
    per_token = ALL_REGIMES[case.regime][0]
    results = []
    for plan in plans:
        run = run_global_batch(data, case.layout, plan, gpt=gpt, calculate_per_token_loss=per_token)
        results.append((run.gradients, run.report))
    return results


def references_on_rank(
    gpt: TinyGPT,
    batch: GlobalBatch,
    plans: Sequence[AggregatorPlan],
    token_losses: Callable[[Tensor, dict[str, Tensor]], Tensor] = policy_gradient_losses,
) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradient of every plan's mode by plain autograd on the whole batch."""
    return [
        reference_run(
            gpt,
            batch,
            token_losses,
            plan.loss_agg_mode,
            loss_scale_factor=plan.loss_scale_factor,
            norm_semantics=plan.norm_semantics,
            sequence_count=plan.sequence_count,
        )
        for plan in plans
    ]


def _scalar_error(got: float, expected: float) -> float:
    error = abs(got - expected)
    if math.isnan(error):
        return math.inf
    return error / abs(expected) if expected else error
