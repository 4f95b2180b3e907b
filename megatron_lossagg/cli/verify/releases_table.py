"""`megatron-lossagg verify --releases`: one row per release, layout and regime."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import typer

from megatron_lossagg.testing.ranks.releases import RELEASES, find_release
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.cases import Case
from megatron_lossagg.verification.release_matrix import MatrixEntry, run_release

_ROW = "{:<8} {:<20} {:<2}  {:>8} {:>8}  {}"


def chosen_releases(text: str) -> list[str]:
    """Versions out of "0.13.1,0.19.2", or those of all proved releases out of "all".

    Raises:
        ValueError: a version that is not one of them, or none at all.
    """
    if text.strip() == "all":
        return [release.version for release in RELEASES]
    versions = [version.strip() for version in text.split(",") if version.strip()]
    if not versions:
        raise ValueError(f"--releases {text!r} names none; expected such as '0.13.1,0.19.2' or all")
    return [find_release(version).version for version in dict.fromkeys(versions)]


def verify_releases(
    versions: Sequence[str],
    folder: str | os.PathLike[str],
    cases: Sequence[Case],
    modes: dict[str, AggregatorPlan],
    *,
    fault: str | None,
    timeout_s: float,
    as_json: bool,
) -> bool:
    """Run the cases on each release and print what comes out, rows as they are there.

    Returns:
        Whether every case is exact, or refused where it must be.
    """
    started = time.monotonic()
    entries: list[MatrixEntry] = []
    running = _run(versions, folder, cases, modes, fault, timeout_s, entries)
    if as_json:
        list(running)
        seconds = round(time.monotonic() - started, 1)
        passed = all(entry.passed for entry in entries)
        cases_as_json = [_as_json(entry) for entry in entries]
        report = {"passed": passed, "seconds": seconds, "cases": cases_as_json}
        typer.echo(json.dumps(report, indent=2))
        return passed
    typer.echo("Worst relative error over the modes, of the gradient and of the reported loss\n")
    typer.echo(_ROW.format("release", "layout", "", "gradient", "loss", ""))
    for row in _rows(running):
        typer.echo(row)
    failed = sum(not entry.passed for entry in entries)
    refused = sum(entry.is_refusal for entry in entries)
    verdict = f"FAILED: {failed} of {len(entries)} cases" if failed else f"OK: {len(entries)} cases"
    note = f", {refused} of them refused as they must be" if refused else ""
    typer.echo(f"\n{verdict}{note}, in {time.monotonic() - started:.0f} s.")
    return not failed


def _run(
    versions: Sequence[str],
    folder: str | os.PathLike[str],
    cases: Sequence[Case],
    modes: dict[str, AggregatorPlan],
    fault: str | None,
    timeout_s: float,
    entries: list[MatrixEntry],
) -> Iterator[MatrixEntry]:
    """All entries, which are also added to `entries`."""
    for version in versions:
        typer.echo(f"megatron-core {version}: starting ranks", err=True)
        for entry in run_release(version, cases, folder, modes, fault=fault, timeout_s=timeout_s):
            entries.append(entry)
            yield entry


def _rows(entries: Iterable[MatrixEntry]) -> Iterator[str]:
    """One row for neighbours that differ in the way to plan."""
    for (version, layout, regime), group in groupby(
        entries, key=lambda entry: (entry.version, entry.case.layout, entry.case.regime)
    ):
        same = list(group)
        ran = [mode for entry in same if entry.result for mode in entry.result.modes]
        worst = min(same, key=lambda entry: (entry.passed, -entry.worst_error))
        gradient = f"{max(mode.gradient_error for mode in ran):.0e}" if ran else "-"
        loss = f"{max(mode.loss_error for mode in ran):.0e}" if ran else "-"
        outcome = "exact" if worst.passed and not worst.is_refusal else worst.outcome
        yield _ROW.format(version, str(layout), regime, gradient, loss, outcome)


def _as_json(entry: MatrixEntry) -> dict[str, Any]:
    return {
        "megatron_core": entry.version,
        "layout": str(entry.case.layout),
        "regime": entry.case.regime,
        "planning": entry.case.planning,
        "data": entry.case.data,
        "form": entry.case.form,
        "cp_gradient": entry.case.cp_gradient,
        "passed": entry.passed,
        "refused": entry.is_refusal,
        "reason": entry.reason,
        "modes": [] if entry.result is None else [vars(mode) for mode in entry.result.modes],
    }
