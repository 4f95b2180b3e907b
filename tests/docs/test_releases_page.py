"""Property: docs/releases.md, which `make conformance` writes, has every proved release."""

from __future__ import annotations

from pathlib import Path

from megatron_lossagg.testing.ranks.releases import RELEASES
from megatron_lossagg.verification.cases import ALL_REGIMES, DEFAULT_MODES, Case
from megatron_lossagg.verification.release_matrix import MATRIX_LAYOUTS, is_refused

PAGE = Path(__file__).parents[2] / "docs" / "releases.md"


def test_every_release_layout_and_regime_has_passed():
    """One row per release and layout: a bound, or a refusal where there must be one."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in table]
    rows = {(version, layout): outcomes for version, layout, *outcomes in cells[2:]}
    assert len(rows) == len(RELEASES) * len(MATRIX_LAYOUTS)
    for release in RELEASES:
        for layout, _ in MATRIX_LAYOUTS:
            bounds = {"R1": "1e-12", "R2": "1e-12", "R3": "1e-06", "R4": "1e-12"}
            expected = [
                "refused" if is_refused(release.version, Case(layout, regime)) else bounds[regime]
                for regime in ALL_REGIMES
            ]
            assert rows[release.version, str(layout)] == [*expected, "agrees"]


def test_the_modes_are_named():
    """The page says which modes were run: all that `verify` runs."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{mode}`" in text for mode in DEFAULT_MODES)
