"""An explanation in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.showing.sentences import headline, notes, reading_help
from megatron_lossagg.explain.showing.tables import TextTable, tables


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print what was read, the tables and the sentences."""
    console.print(Text(explanation.source, style="bold"))
    console.print(Text(headline(explanation)))
    for note in notes(explanation):
        console.print(Text(note, style="dim"))
    console.print()
    for table in tables(explanation):
        for part in _parts(table, console.width):
            console.print(_rich_table(part))
    console.print(Text("In words", style="bold"))
    words = Table.grid(padding=(0, 1, 0, 0))
    for sentence in reading_help(explanation):
        words.add_row("-", Text(sentence))
    console.print(words)


def _parts(table: TextTable, width: int) -> list[TextTable]:
    """The table, or several with some of its columns each if the terminal is too narrow."""
    lines = [table.headings, *(row for section in table.sections for row in section)]
    lines += [table.reference] if table.reference is not None else []
    columns = list(zip(*lines, strict=True))
    # Each column has a blank of padding and one for the line that the box leaves out.
    widths = [2 + max(len(line) for cell in c for line in cell.split("\n")) for c in columns]
    parts: list[list[int]] = [[0]]
    for column in range(1, len(columns)):
        if len(parts[-1]) > 1 and sum(widths[c] for c in [*parts[-1], column]) > width:
            parts.append([0])
        parts[-1].append(column)
    return [table.with_columns(part) for part in parts]


def _rich_table(table: TextTable) -> Table:
    result = Table(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for place, heading in enumerate(table.headings):
        result.add_column(
            Text(heading), justify="right" if place else "left", vertical="top", no_wrap=True
        )
    for section in table.sections:
        for row in section:
            result.add_row(*map(Text, row))
        result.add_section()
    if table.reference is not None:
        result.add_row(*(Text(cell, style="dim") for cell in table.reference))
    return result
