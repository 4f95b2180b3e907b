"""The subcommands of `megatron-lossagg`, one module each."""

import os
from typing import Annotated

import typer

from megatron_lossagg.cli.doctor.command import doctor
from megatron_lossagg.cli.explain import explain
from megatron_lossagg.cli.help_text import PlainHelpCommand, PlainHelpGroup
from megatron_lossagg.cli.modes import modes
from megatron_lossagg.cli.verify.command import verify
from megatron_lossagg.modes.registry import IMPORT_VARIABLE, import_named_modules

app = typer.Typer(
    help="Loss aggregation for RL on Megatron-Core, exact in every parallel layout.",
    cls=PlainHelpGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (verify, doctor, modes, explain):
    app.command(cls=PlainHelpCommand)(command)


@app.callback()
def main(
    import_modules: Annotated[
        str | None,
        typer.Option(
            "--import",
            help="Modules that register modes, separated by commas; also in the current folder. "
            f"Default: the environment variable {IMPORT_VARIABLE}.",
        ),
    ] = None,
) -> None:
    """Loss aggregation for RL on Megatron-Core, exact in every parallel layout."""
    if import_modules is not None:
        os.environ[IMPORT_VARIABLE] = import_modules  # ranks inherit it
    try:
        import_named_modules()
    except ValueError as error:
        typer.echo(f"megatron-lossagg: {error}", err=True)
        raise typer.Exit(2) from None
