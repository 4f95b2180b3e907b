"""The console that commands print on."""

from __future__ import annotations

import os

from rich.console import Console


def terminal_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """A console that writes escape codes to a terminal alone, and none at all with NO_COLOR.

    By itself rich drops colours where NO_COLOR is set, and keeps bold and dim.

    Args:
        stderr: write there instead of to the standard output.
        highlight: colour numbers and the like in what is printed.

    Returns:
        The console; its `color_system` is None where it writes plain text.
    """
    return Console(
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=highlight,
    )
