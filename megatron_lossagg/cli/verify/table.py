"""What `megatron-lossagg verify` prints: progress, a table, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_lossagg.cli.terminal import terminal_console
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.verification.cases import GRADIENT_BOUNDS, LOSS_BOUND, CaseResult

_FORMS = {
    "rows": "padded rows",
    "cu_seqlens": "packed sequences (cu_seqlens)",
    "cu_seqlens_padded": "packed sequences with padding in between (cu_seqlens_padded)",
}
_MAX_LISTED = 10


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        results: of the cases that were finished.
        failure: what stopped the run, if anything.
        seconds: how long it took.
    """

    results: Sequence[CaseResult]
    failure: LossAggError | None
    seconds: float

    @property
    def failed(self) -> list[CaseResult]:
        """The results with an error above its bound."""
        return [result for result in self.results if not result.passed]

    @property
    def passed(self) -> bool:
        """Whether all cases were run and are exact."""
        return self.failure is None and not self.failed


def with_progress(results: Iterable[CaseResult], total: int, *, show: bool) -> Iterator[CaseResult]:
    """Pass results through, with a progress bar on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = terminal_console(stderr=True)
    disable = not show or console.color_system is None
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("starting ranks", total=total)
        for result in results:
            progress.update(task, advance=1, description=str(result.case.layout))
            yield result


def print_table(outcome: Outcome, modes: Sequence[str]) -> None:
    """Print a row per layout and regime, then the verdict."""
    console = terminal_console()
    console.print("Relative error of the whole model's gradient in mode", highlight=False)
    for number, mode in enumerate(modes, start=1):
        # Their names would need more columns than a terminal has.
        console.print(f"  ({number}) {mode}", highlight=False, soft_wrap=True)
    console.print("and of the reported loss")
    headings = [*(f"({number})" for number in range(1, len(modes) + 1)), "loss"]
    for table in _tables(headings, list(_rows(outcome.results)), console.width):
        console.print(table)
    _print_notes(console, outcome.results)
    if outcome.failure is not None:
        console.print("[bold red]FAILED[/]: a run did not finish.")
        typer.echo(str(outcome.failure), err=True)
    elif outcome.passed:
        console.print(
            f"[bold green]OK[/]: {len(outcome.results)} cases exact, in {outcome.seconds:.0f} s."
        )
    else:
        console.print(
            f"[bold red]FAILED[/]: {len(outcome.failed)} of {len(outcome.results)} cases above the "
            f"bound, in {outcome.seconds:.0f} s:"
        )
        for result in outcome.failed[:_MAX_LISTED]:
            console.print(f"  {result.case}", highlight=False)
        if len(outcome.failed) > _MAX_LISTED:
            console.print(f"  and {len(outcome.failed) - _MAX_LISTED} more")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values."""
    from importlib.metadata import version

    return {
        "passed": outcome.passed,
        "seconds": round(outcome.seconds, 1),
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
        "failure": None if outcome.failure is None else str(outcome.failure),
        "cases": [
            {
                **asdict(result.case),
                "layout": str(result.case.layout),
                "passed": result.passed,
                "gradient_bound": GRADIENT_BOUNDS[result.case.regime],
                "loss_bound": LOSS_BOUND,
                "modes": [asdict(mode) for mode in result.modes],
            }
            for result in outcome.results
        ],
    }


def _print_notes(console: Console, results: Sequence[CaseResult]) -> None:
    """What the entries stand for."""
    cases = [result.case for result in results]
    plannings = _and(case.planning for case in cases)
    forms = _and(_FORMS[case.form] for case in cases)
    conventions = _and(case.cp_gradient for case in cases)
    if cases:
        console.print(
            f"Each entry is the worst of the steps planned by {plannings}, on {forms}"
            + ("." if conventions == "local" else f", with cp_gradient {conventions} where C > 1.")
        )
    if any(case.data != "all" for case in cases):
        console.print("* data on tensor-parallel rank 0 of the first and last stage alone")
    console.print(
        f"Bounds: gradient {GRADIENT_BOUNDS['R1']:.0e}, {GRADIENT_BOUNDS['R3']:.0e} in R3 "
        f"(Megatron divides in float32 there); loss {LOSS_BOUND:.0e}."
    )


def _and(words: Iterable[str]) -> str:
    """Each of the words once, as in "a, b and c"."""
    different = list(dict.fromkeys(words))
    return " and ".join([", ".join(different[:-1])] * (len(different) > 1) + different[-1:])


def _rows(results: Sequence[CaseResult]) -> Iterator[list[str]]:
    """One row per layout and regime, with the worst error over all else."""
    together: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        mark = "" if result.case.data == "all" else " *"
        key = (f"{result.case.layout}{mark}", result.case.regime)
        together.setdefault(key, []).append(result)
    for (layout, regime), group in together.items():
        modes = zip(*(result.modes for result in group), strict=True)
        gradients = [_worst([mode.gradient_error for mode in same]) for same in modes]
        loss = _worst([mode.loss_error for result in group for mode in result.modes])
        cells = [_cell(error, GRADIENT_BOUNDS[regime]) for error in gradients]
        yield [layout, regime, *cells, _cell(loss, LOSS_BOUND)]


def _tables(headings: list[str], rows: list[list[str]], width: int) -> Iterator[Table]:
    """One table, or several with some of the columns each if the terminal is too narrow."""
    width_of_labels = max([len(row[0]) for row in rows], default=0) + len("   R1  ")
    num_columns = max(1, (width - width_of_labels) // len("3e-16  "))
    for start in range(0, len(headings), num_columns):
        chosen = slice(start, start + num_columns)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for label in ("layout", ""):
            table.add_column(label, no_wrap=True)
        for heading in headings[chosen]:
            table.add_column(heading, justify="right", no_wrap=True)
        for layout, regime, *cells in rows:
            table.add_row(layout, regime, *cells[chosen])
        yield table


def _worst(errors: list[float]) -> float:
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _cell(error: float, bound: float) -> str:
    text = f"{error:.0e}" if error else "0"
    return text if error <= bound else f"[bold red]{text}[/]"
