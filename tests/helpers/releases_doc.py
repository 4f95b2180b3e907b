"""The table of releases: what `test_releases` found, as the page docs/releases.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

import pytest

from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.ranks.releases import RELEASES
from megatron_lossagg.verification.cases import ALL_REGIMES, DEFAULT_MODES
from megatron_lossagg.verification.release_matrix import MATRIX_LAYOUTS, MatrixEntry, matrix_cases

# Filled by test_releases.py, read when the run ends.
ENTRIES = pytest.StashKey[list[MatrixEntry]]()
AGREEMENTS = pytest.StashKey[list[tuple[str, Layout, str]]]()

_PAGE = """\
# Releases of Megatron-Core

<!-- Written by `make conformance`: don't edit. -->

Each release is unpacked and imported by CPU ranks of its own, which drive its schedules,
`DistributedDataParallel` and `finalize_model_grads` with a float64 GPT on a ragged batch. The
gradient of the whole model and the reported loss are compared with plain autograd in one process.
An entry is the relative error that no mode exceeded, planned by `begin_step` and by `wrap`. Modes:
{modes}.

{table}

R1 and R2: `calculate_per_token_loss` off, two and three values; R3 and R4: on, three and two. In R3
Megatron divides gradients in float32. *refused*: the release sums `num_tokens` without the
context-parallel ranks, gradients would be wrong, and the plugin raises with the reason. *agrees*:
`ScheduleContract.measure` found in all four regimes what `detect` says.

Run with Python {python} and torch {torch}.
"""


def is_complete(entries: Iterable[MatrixEntry]) -> bool:
    """Whether every case ran on every release, with whatever outcome."""
    ran = {(entry.version, entry.case) for entry in entries}
    return ran == {(release.version, case) for release in RELEASES for case in matrix_cases()}


def as_page(entries: list[MatrixEntry], agreements: list[tuple[str, Layout, str]]) -> str:
    """The whole page; the same after every run that passes."""
    return _PAGE.format(
        modes=", ".join(f"`{mode}`" for mode in DEFAULT_MODES),
        table="\n".join(as_table(entries, agreements)),
        python=".".join(platform.python_version_tuple()[:2]),
        torch=version("torch").split("+")[0],
    )


def as_table(
    entries: list[MatrixEntry], agreements: list[tuple[str, Layout, str]], *, numbers: bool = False
) -> list[str]:
    """One row per release and layout that ran; `numbers` are the worst errors, not their bounds."""
    lines = [
        f"| megatron-core | layout | {' | '.join(ALL_REGIMES)} | `measure` |",
        f"| --- | --- |{' --- |' * len(ALL_REGIMES)} --- |",
    ]
    ran = {(entry.version, entry.case.layout) for entry in entries}
    for release in RELEASES:
        for layout, _ in MATRIX_LAYOUTS:
            if (release.version, layout) not in ran:
                continue
            cells = [
                _cell([e for e in entries if _key(e) == (release.version, layout, regime)], numbers)
                for regime in ALL_REGIMES
            ]
            agreed = all((release.version, layout, regime) in agreements for regime in ALL_REGIMES)
            cells.append("agrees" if agreed else "-")
            lines.append(f"| {release.version} | {layout} | {' | '.join(cells)} |")
    return lines


def _key(entry: MatrixEntry) -> tuple[str, Layout, str]:
    return entry.version, entry.case.layout, entry.case.regime


def _cell(entries: list[MatrixEntry], numbers: bool) -> str:
    """The worst of the ways to plan."""
    if not entries:
        return "-"
    worst = min(entries, key=lambda entry: (entry.passed, -entry.worst_error))
    if numbers and worst.result is not None and worst.passed:
        return f"{worst.worst_error:.0e}"
    return worst.outcome
