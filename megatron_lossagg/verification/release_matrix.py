"""Every mode in every regime and layout on every proved Megatron-Core release.

A case on a release has one of four outcomes: exact, above the bound, refused by the plugin, or not
run. Only the first passes, and a refusal that the release is known to need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.ranks.rank_failure import RankFailure
from megatron_lossagg.testing.ranks.rank_pool import RankPool
from megatron_lossagg.testing.ranks.releases import find_release, release_pool
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import (
    ALL_REGIMES,
    GRADIENT_BOUNDS,
    LOSS_BOUND,
    Case,
    CaseResult,
    default_cases,
)
from megatron_lossagg.verification.references import References

MATRIX_LAYOUTS = tuple(
    (Layout.parse(text), "all") for text in ("C=2 D=2 M=2", "PP=2 D=2 M=2", "PP=2 VPP=2 M=4")
)
# Of the message in `refusals`.
_REFUSAL = "sums num_tokens over data-parallel ranks without context-parallel ones"


@dataclass(frozen=True)
class MatrixEntry:
    """What became of one case on one release.

    Attributes:
        version: of megatron-core.
        case: the layout, regime and way to plan.
        result: the errors of every mode; None if there are none.
        reason: why there are none, in one line.
        is_refusal: whether the plugin refused the case, as it must on this release.
    """

    version: str
    case: Case
    result: CaseResult | None = None
    reason: str = ""
    is_refusal: bool = False

    @property
    def passed(self) -> bool:
        """Whether every mode is within its bounds, or the case is refused as it must be."""
        return self.is_refusal if self.result is None else self.result.passed

    @property
    def outcome(self) -> str:
        """A word, or the bound that all errors keep; the same in every run that passes."""
        if self.result is None:
            return "refused" if self.is_refusal else f"not run: {self.reason}"
        bound = max(GRADIENT_BOUNDS[self.case.regime], LOSS_BOUND)
        return f"{bound:.0e}" if self.result.passed else f"FAILED: {self.worst_error:.0e}"

    @property
    def worst_error(self) -> float:
        """The largest error of a gradient or a reported loss over all modes; 0 if none ran."""
        if self.result is None:
            return 0.0
        return max(max(mode.gradient_error, mode.loss_error) for mode in self.result.modes)


def matrix_cases(plannings: Sequence[str] = ("begin_step", "wrap")) -> list[Case]:
    """The cases that are run on every release: three layouts in R1 to R4."""
    return default_cases(MATRIX_LAYOUTS, tuple(ALL_REGIMES), plannings)


def is_refused(version: str, case: Case) -> bool:
    """Whether the plugin must refuse the case on this release (see `refusals`)."""
    in_r3_with_cp = case.regime == "R3" and case.layout.cp > 1
    return in_r3_with_cp and find_release(version).refuses_r3_with_cp


def run_release(
    version: str,
    cases: Sequence[Case],
    folder: str | os.PathLike[str],
    modes: dict[str, AggregatorPlan] | None = None,
    *,
    fault: str | None = None,
    timeout_s: float = 120.0,
) -> Iterator[MatrixEntry]:
    """Start ranks that import the release, and yield what becomes of each case.

    Args:
        version: one of `releases.RELEASES`; fetched into the folder if it is not there.
        cases: in this order; a change of layout takes longer than one of the regime.
        folder: where releases are kept.
        modes: as for `verification.run_cases`.
        fault: as for `verification.run_cases`.
        timeout_s: seconds after which a rank counts as hung.

    Yields:
        One entry per case.
    """
    references: References = {}
    num_ranks = max(case.layout.world_size for case in cases)
    done = 0
    try:
        with release_pool(num_ranks, version, folder, timeout_s) as pool:
            for case in cases:
                yield run_case(pool, version, case, modes, fault=fault, references=references)
                done += 1
    except LossAggError as error:  # it could not be fetched, imported or started
        for case in cases[done:]:
            yield MatrixEntry(version, case, reason=_one_line(error))


def run_case(
    pool: RankPool,
    version: str,
    case: Case,
    modes: dict[str, AggregatorPlan] | None = None,
    *,
    fault: str | None = None,
    references: References | None = None,
) -> MatrixEntry:
    """One case on ranks that import the release; a refusal or a failure becomes an entry.

    Args:
        pool: from `releases.release_pool`.
        version: the release that its ranks import.
        case: what to run.
        modes: as for `verification.run_cases`.
        fault: as for `verification.run_cases`.
        references: as for `verification.run_cases`.

    Returns:
        The entry.
    """
    try:
        [result] = run_cases(pool, [case], modes, fault=fault, references=references)
    except RankFailure as failure:
        cause = failure.__cause__ or failure
        refuses = isinstance(cause, LossAggError) and _REFUSAL in str(cause)
        return MatrixEntry(
            version,
            case,
            reason=_one_line(cause),
            is_refusal=refuses and is_refused(version, case),
        )
    return MatrixEntry(version, case, result)


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
