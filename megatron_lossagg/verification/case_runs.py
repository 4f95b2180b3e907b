"""Hold the plugin against the reference: whole-model gradients and reported losses of each case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.batch.packed_batch import pack_batch
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.ranks.rank_pool import RankPool
from megatron_lossagg.testing.run import run_global_batch
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.cases import (
    ALL_REGIMES,
    DEFAULT_MODES,
    Case,
    CaseResult,
    ModeResult,
    standard_batch,
)
from megatron_lossagg.verification.references import Reference, References, references_on_rank

# (whole-model gradient on rank 0, report) of one plan on one rank.
RunOfPlan = tuple[dict[str, Tensor] | None, dict[str, float]]


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

    Yields:
        One result per case.
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
        plans = [_plan_of_case(plan, case, fault) for plan in modes.values()]
        on_ranks = pool.run(
            case_on_rank, gpt, batch, case, plans, world_size=case.layout.world_size
        )
        # From runs of all plans per rank to runs on all ranks per plan.
        of_plans = zip(*on_ranks, strict=True)
        compared = zip(modes, of_plans, references[batch.assignment], strict=True)
        yield CaseResult(case, tuple(_compared(*of_mode) for of_mode in compared))


def _plan_of_case(plan: AggregatorPlan, case: Case, fault: str | None) -> AggregatorPlan:
    """The plan as the case wants it run."""
    return replace(
        plan,
        planning=case.planning,
        data=case.data,
        cp_gradient=case.cp_gradient,
        returns=ALL_REGIMES[case.regime][1],
        fault=fault,
        validate=fault is None,
    )


def _compared(mode: str, on_ranks: Sequence[RunOfPlan], reference: Reference) -> ModeResult:
    """How far the runs of one plan, one for each rank, are from its reference."""
    loss, expected = reference
    gradients, _ = on_ranks[0]
    assert gradients is not None  # rank 0 has them
    reported = [report["loss"] for _, report in on_ranks if "loss" in report]
    return ModeResult(
        mode,
        relative_error(gradients, expected),
        max(_scalar_error(value, loss) for value in reported),
    )


def case_on_rank(
    gpt: TinyGPT, batch: GlobalBatch, case: Case, plans: Sequence[AggregatorPlan]
) -> list[RunOfPlan]:
    """On each rank: (whole-model gradient on rank 0, report) of every plan. Communicates."""
    data = batch if case.form == "rows" else pack_batch(batch, case.layout, case.form)
    per_token = ALL_REGIMES[case.regime][0]
    results = []
    for plan in plans:
        run = run_global_batch(data, case.layout, plan, gpt=gpt, calculate_per_token_loss=per_token)
        results.append((run.gradients, run.report))
    return results


def _scalar_error(got: float, expected: float) -> float:
    error = abs(got - expected)
    if math.isnan(error):
        return math.inf
    return error / abs(expected) if expected else error
