"""Property: every mode is exact on every proved release of Megatron-Core, really imported.

Each release gets ranks of its own that import it from an unpacked wheel. What the tests find is
printed as a table at the end of the run, and written where `--releases-table` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from releases_doc import AGREEMENTS, ENTRIES
from test_measure import chunks_of, measured, measuring_aggregator

from megatron_lossagg import LossAggError, ParallelGroups, ScheduleContract
from megatron_lossagg.schedule.measure import measure_schedule
from megatron_lossagg.testing import RankFailure, RankPool
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg.testing.ranks.releases import RELEASES, imported_release, release_pool
from megatron_lossagg.verification.cases import ALL_REGIMES, Case
from megatron_lossagg.verification.references import References
from megatron_lossagg.verification.release_matrix import (
    MATRIX_LAYOUTS,
    is_refused,
    matrix_cases,
    run_case,
)

pytestmark = pytest.mark.conformance
FOLDER = Path(__file__).parents[2] / ".releases"
LAYOUTS = [layout for layout, _ in MATRIX_LAYOUTS]


@dataclass
class Ranks:
    """Ranks that import one release, and what the reference gave on them."""

    version: str
    pool: RankPool
    references: References = field(default_factory=dict)


@pytest.fixture(scope="module", params=[release.version for release in RELEASES])
def ranks(request):
    with release_pool(4, request.param, FOLDER, timeout_s=240) as pool:
        yield Ranks(request.param, pool)


def test_the_ranks_import_the_release(ranks):
    """Version and file, as each rank sees them."""
    for version, file in ranks.pool.run(imported_release):
        assert version == ranks.version
        assert Path(file).is_relative_to(FOLDER / ranks.version)


@pytest.mark.parametrize("regime", ALL_REGIMES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout).replace(" ", ","))
def test_every_mode(ranks, layout, regime, request):
    """Gradient and loss of the 6 modes within their bounds; a refusal where there must be one."""
    cases = [case for case in matrix_cases() if (case.layout, case.regime) == (layout, regime)]
    entries = [
        run_case(ranks.pool, ranks.version, case, references=ranks.references) for case in cases
    ]
    request.config.stash.setdefault(ENTRIES, []).extend(entries)
    assert len(entries) == 2
    for entry in entries:
        assert entry.passed, entry
        assert entry.is_refusal == is_refused(ranks.version, entry.case)
        if not entry.is_refusal:
            assert len(entry.result.modes) == 6


@pytest.mark.parametrize("regime", ALL_REGIMES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout).replace(" ", ","))
def test_measure_confirms_detect(ranks, layout, regime, request):
    """The measured factor is the one of `detect`; where that refuses, `measure` does too."""
    arguments = (measured, str(layout), regime)
    if is_refused(ranks.version, Case(layout, regime)):
        with pytest.raises(RankFailure, match="sums num_tokens") as caught:
            ranks.pool.run(*arguments, world_size=layout.world_size)
        assert isinstance(caught.value.__cause__, LossAggError)
    else:
        for found, factor, expected in ranks.pool.run(*arguments, world_size=layout.world_size):
            assert found == regime
            assert factor == pytest.approx(expected, rel=1e-6)
    request.config.stash.setdefault(AGREEMENTS, []).append((ranks.version, layout, regime))


def what_is_measured_in_r3_with_cp():
    """Measure what `detect` may refuse; "" if the gradient is right."""
    [chunk] = chunks_of("C=2 D=2 M=2", True)
    groups = ParallelGroups.from_megatron()
    contract = ScheduleContract("R3", groups.dp_size, groups.cp_size)
    try:
        measure_schedule(unwrap(chunk).config, groups, contract, model=[chunk])
    except LossAggError as error:
        return str(error)
    return ""


def test_what_is_refused_would_be_wrong(ranks):
    """R3 with context parallelism: refused on the releases, and only those, that get it wrong.

    They sum num_tokens without the context-parallel ranks. Here each of the two counts one token,
    so the gradient is twice too large; with other counts it would differ between them.
    """
    must_refuse = is_refused(ranks.version, Case(Layout.parse("C=2 D=2 M=2"), "R3"))
    for message in ranks.pool.run(what_is_measured_in_r3_with_cp):
        if must_refuse:
            assert "2 times as large as it should" in message
        else:
            assert message == ""


def test_the_aggregator_measures(ranks):
    """contract="measure" passes on the release, and catches a finalize that scales by 3."""
    for before, after, message in ranks.pool.run(measuring_aggregator):
        assert (before, after) == (True, False)
        assert "3 times as large as it should" in message
