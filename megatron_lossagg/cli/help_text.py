"""`--help` as plain text, in which no name is broken over two lines or cut off.

The panels that typer draws with rich cut names to fit their columns, and read `[b, s]` as markup;
its plain form breaks a line at any hyphen, and most names here have some.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

_MAX_WIDTH = 100
_COLUMN = 26  # where what a name stands for begins


class PlainHelpCommand(TyperCommand):
    """A command whose help is `help_text`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of this command."""
        formatter.write(help_text(ctx))


class PlainHelpGroup(TyperGroup):
    """A group of commands whose help is `help_text`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group."""
        formatter.write(help_text(ctx))


def help_text(ctx: Any) -> str:
    """Usage, docstring, arguments, options and commands, for the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    command = ctx.command
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    parts = [_filled(f"Usage: {usage}", width, hanging="    ")]
    parts += [_filled(text, width) for text in (command.help or "").split("\n\n")]
    for title, rows in _sections(ctx):
        parts.append("\n".join([title, *(_row(name, text, width) for name, text in rows)]))
    return "\n\n".join(parts)


def _sections(ctx: Any) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
    command = ctx.command
    parameters = command.get_params(ctx)
    for kind, title in (("argument", "Arguments:"), ("option", "Options:")):
        records = [p.get_help_record(ctx) for p in parameters if p.param_type_name == kind]
        if rows := [record for record in records if record is not None]:
            yield title, rows
    if isinstance(command, TyperGroup):
        commands = command.commands.items()
        yield "Commands:", [(name, each.get_short_help_str(limit=200)) for name, each in commands]


def _row(name: str, text: str, width: int) -> str:
    """A name, and beside it, or below it where it is long, what it stands for."""
    indent = " " * _COLUMN
    first = f"  {name}".ljust(_COLUMN)
    if len(first) > _COLUMN or first[-1] != " ":
        return "\n".join([first, _filled(text, width, indent, indent)])
    return _filled(text, width, first, indent)


def _filled(text: str, width: int, first: str = "", hanging: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
