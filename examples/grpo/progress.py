"""What a run shows while it trains: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from grpo.metrics import Metrics

_BARS = "▁▂▃▄▅▆▇█"
_NUM_PLAIN_LINES = 20


@dataclass(frozen=True)
class Column:
    """A metric that is shown: its name, a heading with the unit, and a format."""

    metric: str
    heading: str
    format: str

    @property
    def width(self) -> int:
        """Characters of the column where steps are shown line by line."""
        return max(9, len(self.heading))


class RunDisplay:
    """Shows steps as they end. A context manager; made on the first rank only.

    Args:
        columns: what to show of each step.
        num_steps: of the whole run.
        history: steps done before, if the run goes on from a checkpoint.
        is_live: None: if stdout is a terminal.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        num_steps: int,
        history: Sequence[Metrics] = (),
        *,
        is_live: bool | None = None,
    ) -> None:
        is_live = sys.stdout.isatty() if is_live is None else is_live
        self._columns = columns
        self._num_steps = num_steps
        self._history = list(history)
        self._live: Live | None = None
        if is_live:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TimeRemainingColumn(),
                expand=True,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=len(self._history))
            console = Console(highlight=False, force_terminal=True)
            self._live = Live(self._view(), console=console, refresh_per_second=5)

    def __enter__(self) -> RunDisplay:
        if self._live is not None:
            self._live.start()
        else:
            self._print("  ".join(["step", *(f"{c.heading:>{c.width}}" for c in self._columns)]))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, metrics: Metrics) -> None:
        """Show a step that has ended."""
        self._history.append(metrics)
        step = int(metrics["step"])
        if self._live is not None:
            self._bar.update(self._task, completed=step)
            self._live.update(self._view())
            return
        every = max(1, self._num_steps // _NUM_PLAIN_LINES)
        if step % every == 0 or step in (1, self._num_steps):
            cells = [f"{step:>4}"]
            cells += [f"{_text(c, metrics):>{c.width}}" for c in self._columns]
            self._print("  ".join(cells))

    def _print(self, text: str) -> None:
        # Not through rich, which wraps lines at the width of a terminal that is not there.
        print(text, flush=True)

    def _view(self) -> Group:
        table = Table.grid(padding=(0, 3))
        for column in self._columns:
            values = [m[column.metric] for m in self._history]
            last = _text(column, self._history[-1]) if self._history else "-"
            table.add_row(column.heading, f"[bold]{last:>8}[/bold]", _sparkline(values))
        return Group(table, self._bar)


def _text(column: Column, metrics: Metrics) -> str:
    return format(metrics[column.metric], column.format)


def _sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as a row of bars, each the mean of a stretch of steps."""
    if not values:
        return ""
    bounds = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    low, span = min(means), max(means) - min(means)
    if span == 0:
        return _BARS[0] * len(means)
    return "".join(_BARS[int((m - low) / span * (len(_BARS) - 1))] for m in means)
