"""What `doctor` found, on a terminal or in a pipe: no name is broken over two lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_lossagg.cli.doctor.case import DoctorCase
from megatron_lossagg.cli.doctor.diagnosis import Diagnosis, Factor
from megatron_lossagg.cli.terminal import terminal_console


def new_console() -> Console:
    """The standard output; with NO_COLOR without any styles, as in a pipe."""
    return terminal_console(highlight=False)


def print_text(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a line, of text or (text, style); on a terminal it is broken between words.

    A pipe gets it whole, so that it can be searched.
    """
    console.print(Text.assemble(*parts), soft_wrap=not console.is_terminal)


def print_refusal(console: Console, layout: str, reason: str) -> None:
    """Say that a setting is refused, and why."""
    print_text(console, ("REFUSED", "bold red"), f" in '{layout}': {reason}")


def print_diagnosis(
    console: Console, case: DoctorCase, diagnosis: Diagnosis, measured: float | None
) -> None:
    """Print regime, factors, checksum, mistakes and, if there is one, the measured ratio."""
    c = diagnosis.contract
    flag = "on" if case.calculate_per_token_loss else "off"
    print_text(
        console,
        (f"Regime {c.regime}", "bold"),
        f": calculate_per_token_loss is {flag}, loss_func returns {diagnosis.returns}",
    )
    print_text(
        console,
        f"{case.layout}: {case.layout.world_size} ranks, D={c.dp_size}, C={c.cp_size}, "
        f"M={diagnosis.num_microbatches}, cp_gradient={c.cp_gradient}\n",
    )
    _print_factors(
        console, "What Megatron (megatron.core) does to a returned loss", diagnosis.megatron
    )
    _print_factors(
        console, "What the plugin multiplies S, its part of the sum, by", diagnosis.plugin
    )
    print_text(console, f"{case.checksum_text(diagnosis.checksum)}\n")
    _print_mistakes(console, diagnosis)
    if measured is not None:
        print_text(
            console,
            ("Measured", "bold green"),
            f" on {case.layout.world_size} CPU ranks: the gradient arrives {measured:.9g} times as "
            "large as it should.",
        )


def _print_factors(console: Console, title: str, factors: tuple[Factor, ...]) -> None:
    print_text(console, (title, "italic"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("factor", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    _add_column_of_words(table, "where from", [factor.origin for factor in factors])
    for factor in factors:
        value = "?" if factor.value is None else f"{factor.value:.6g}"
        table.add_row(factor.name, factor.symbol, value, factor.origin)
    known = [factor.value for factor in factors if factor.value is not None]
    if len(factors) > 1 and len(known) == len(factors):
        table.add_section()
        table.add_row("together", "", f"{math.prod(known):.6g}", "")
    console.print(table)


def _print_mistakes(console: Console, diagnosis: Diagnosis) -> None:
    mistakes = diagnosis.mistakes
    table = Table(box=box.SIMPLE_HEAD)
    _add_column_of_words(table, "without it you would", [m.what for m in mistakes])
    table.add_column("gradient", no_wrap=True, justify="right")
    _add_column_of_words(table, "which means", [m.effect for m in mistakes])
    for mistake in mistakes:
        ratio = "varies" if mistake.ratio is None else f"x {mistake.ratio}"
        table.add_row(Text(mistake.what), ratio, Text(mistake.effect))
    console.print(table)


def _add_column_of_words(table: Table, heading: str, cells: Sequence[str]) -> None:
    """A column that is broken between words, and wide enough for each of them."""
    longest = max(len(word) for cell in cells for word in cell.split())
    table.add_column(heading, min_width=longest)
