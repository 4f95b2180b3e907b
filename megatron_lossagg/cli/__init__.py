"""The command `megatron-lossagg`. Needs the extra `cli` (typer, rich, PyYAML)."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"megatron-lossagg needs {error.name}: pip install 'megatron_lossagg[cli,megatron]'"
        )
    from megatron_lossagg.cli.app import app

    app()
