"""`megatron-lossagg verify`: the real schedules against a one-process reference."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_lossagg.commands.releases_table import chosen_releases, verify_releases
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.aggregator_plan import PLANNINGS
from megatron_lossagg.testing.faults import fault_names
from megatron_lossagg.testing.layout import Layout
from megatron_lossagg.testing.rank_pool import RankPool
from megatron_lossagg.testing.release_matrix import MATRIX_LAYOUTS
from megatron_lossagg.testing.verification import (
    ALL_REGIMES,
    DEFAULT_LAYOUTS,
    DEFAULT_MODES,
    GRADIENT_BOUNDS,
    LOSS_BOUND,
    CaseResult,
    default_cases,
    run_cases,
)

# Narrow enough for a terminal of 80 columns.
_HEADINGS = {
    "token-mean": "token-\nmean",
    "token-sum": "token-\nsum",
    "seq-mean-token-sum": "seq-mean\n-token-\nsum",
    "seq-mean-token-mean": "seq-mean\n-token-\nmean",
    "seq-mean-token-sum-norm": "seq-mean\n-token-\nsum-norm",
    "seq-mean-token-sum-norm/seq-mean": "(norm,\nseq-mean\ncount)",
}
Fault = Enum("Fault", {name: name for name in fault_names()}, type=str)  # type: ignore[misc]


def verify(
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Layouts, separated by ';', such as 'PP=2 D=2 M=4; C=4 M=2'. Default: 11 of them."
        ),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="Modes, separated by commas. Default: all.")
    ] = None,
    regimes: Annotated[
        str,
        typer.Option(help="R1, R2 (calculate_per_token_loss off), R3, R4 (on)."),
    ] = "R1,R3",
    planning: Annotated[
        str, typer.Option(help="begin_step, wrap (the weights ride in loss_mask), or both.")
    ] = "begin_step,wrap",
    plant: Annotated[
        Fault | None,
        typer.Option(help="Plant a fault in the plugin, to see that this command finds it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a rank counts as hung.")
    ] = 120,
    releases: Annotated[
        str | None,
        typer.Option(
            help="Releases of megatron-core to download and run on instead of the installed one, "
            "such as '0.13.1,0.19.2', or 'all' (8). Default layouts are then 3."
        ),
    ] = None,
    releases_dir: Annotated[
        Path, typer.Option(help="Where downloaded releases are kept, and looked for.")
    ] = Path(".releases"),
) -> None:
    """Prove on this machine that gradients and reported losses are those of the global batch.

    Starts CPU processes, drives the installed Megatron-Core's own schedules, DDP and
    finalize_model_grads with a small float64 GPT on a ragged batch, and compares the gradient of
    the whole model and the reported loss of every mode with plain autograd in one process. No GPU
    is used. Exits with 1 if an error is above the bound, with 2 on wrong arguments.
    """
    try:
        versions = [] if releases is None else chosen_releases(releases)
        places = MATRIX_LAYOUTS if versions and layouts is None else _layouts(layouts)
        cases = default_cases(
            places, _choice(regimes, tuple(ALL_REGIMES)), _choice(planning, PLANNINGS)
        )
        chosen = {label: DEFAULT_MODES[label] for label in _choice(modes, tuple(DEFAULT_MODES))}
    except ValueError as error:
        typer.echo(f"verify: {error}", err=True)
        raise typer.Exit(2) from None
    os.environ.setdefault(
        "PYTHONWARNINGS", "ignore"
    )  # of the ranks: Megatron's, about its GPU paths
    fault = None if plant is None else plant.value
    if versions:
        if not verify_releases(
            versions,
            releases_dir,
            cases,
            chosen,
            fault=fault,
            timeout_s=timeout,
            as_json=as_json,
        ):
            raise typer.Exit(1)
        return
    num_ranks = max(case.layout.world_size for case in cases)
    started = time.monotonic()
    results: list[CaseResult] = []
    failure: LossAggError | None = None
    try:
        with RankPool(num_ranks, timeout_s=timeout) as pool:
            running = run_cases(pool, cases, chosen, fault=fault)
            results.extend(_with_progress(running, len(cases), show=not as_json))
    except LossAggError as error:
        failure = error
    seconds = time.monotonic() - started
    passed = failure is None and all(result.passed for result in results)
    if as_json:
        typer.echo(json.dumps(_as_json(results, passed, failure, seconds), indent=2))
    else:
        _print_table(results, list(chosen), passed, failure, seconds)
    if not passed:
        raise typer.Exit(1)


def _layouts(text: str | None) -> list[tuple[Layout, str]]:
    """The layouts to run, each with who has data in it."""
    if text is None:
        return list(DEFAULT_LAYOUTS)
    places = dict(DEFAULT_LAYOUTS)
    layouts = [Layout.parse(part) for part in text.split(";") if part.strip()]
    if not layouts:
        raise ValueError(f"--layouts {text!r} names none; expected such as 'PP=2 D=2 M=4'")
    return [(layout, places.get(layout, "all")) for layout in layouts]


def _choice(text: str | None, known: tuple[str, ...]) -> list[str]:
    """Comma-separated values out of `known`; all of them for None."""
    if text is None:
        return list(known)
    values = [value.strip() for value in text.split(",") if value.strip()]
    wrong = [value for value in values if value not in known]
    if wrong or not values:
        found = ", ".join(repr(value) for value in wrong) or repr(text)
        raise ValueError(f"{found} is none of {', '.join(known)}")
    return values


def _with_progress(
    results: Iterable[CaseResult], total: int, *, show: bool
) -> Iterable[CaseResult]:
    """Pass results through, with a progress bar on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not show) as progress:
        task = progress.add_task("starting ranks", total=total)
        for result in results:
            progress.update(task, advance=1, description=str(result.case.layout))
            yield result


def _print_table(
    results: list[CaseResult],
    modes: list[str],
    passed: bool,
    failure: LossAggError | None,
    seconds: float,
) -> None:
    console = Console()
    table = Table(
        title="Relative error of the whole model's gradient, and of the reported loss",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layout", no_wrap=True)
    table.add_column("", no_wrap=True)
    for mode in modes:
        table.add_column(_HEADINGS.get(mode, mode), justify="right")
    table.add_column("loss", justify="right")
    for row in _rows(results):
        table.add_row(*row)
    console.print(table)
    plannings = " and ".join(dict.fromkeys(result.case.planning for result in results))
    console.print(f"Each entry is the worst of the steps planned by {plannings}.")
    if any(result.case.data != "all" for result in results):
        console.print("* data on tensor-parallel rank 0 of the first and last stage alone")
    console.print(
        f"Bounds: gradient {GRADIENT_BOUNDS['R1']:.0e}, {GRADIENT_BOUNDS['R3']:.0e} in R3 "
        f"(Megatron divides in float32 there); loss {LOSS_BOUND:.0e}."
    )
    failed = sum(not result.passed for result in results)
    if failure is not None:
        console.print("[bold red]FAILED[/]: a run did not finish.")
        typer.echo(str(failure), err=True)
    elif passed:
        console.print(f"[bold green]OK[/]: {len(results)} cases exact, in {seconds:.0f} s.")
    else:
        console.print(
            f"[bold red]FAILED[/]: {failed} of {len(results)} cases above the bound, in "
            f"{seconds:.0f} s."
        )


def _rows(results: list[CaseResult]) -> Iterator[list[str]]:
    """One row per layout and regime, with the worst error over the ways to plan."""
    together: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        mark = "" if result.case.data == "all" else " *"
        key = (f"{result.case.layout}{mark}", result.case.regime)
        together.setdefault(key, []).append(result)
    for (layout, regime), group in together.items():
        modes = zip(*(result.modes for result in group), strict=True)
        gradients = [max(mode.gradient_error for mode in same) for same in modes]
        loss = max(mode.loss_error for result in group for mode in result.modes)
        cells = [_cell(error, GRADIENT_BOUNDS[regime]) for error in gradients]
        yield [layout, regime, *cells, _cell(loss, LOSS_BOUND)]


def _cell(error: float, bound: float) -> str:
    text = f"{error:.0e}" if error else "0"
    return text if error <= bound else f"[bold red]{text}[/]"


def _as_json(
    results: list[CaseResult], passed: bool, failure: LossAggError | None, seconds: float
) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "passed": passed,
        "seconds": round(seconds, 1),
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
        "failure": None if failure is None else str(failure),
        "cases": [
            {
                "layout": str(result.case.layout),
                "regime": result.case.regime,
                "planning": result.case.planning,
                "data": result.case.data,
                "passed": result.passed,
                "gradient_bound": GRADIENT_BOUNDS[result.case.regime],
                "loss_bound": LOSS_BOUND,
                "modes": [vars(mode) for mode in result.modes],
            }
            for result in results
        ],
    }
