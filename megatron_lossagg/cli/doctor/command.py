"""`megatron-lossagg doctor`: what a layout and its flags do to a loss, and how it is undone."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_lossagg.cli.doctor.case import DoctorCase
from megatron_lossagg.cli.doctor.diagnosis import Diagnosis, Factor, diagnose
from megatron_lossagg.errors import LossAggError

# Ranks that --measure starts on this machine; more would only wait for each other.
_MAX_MEASURED_RANKS = 16
_EXAMPLE = "TP=8 PP=4 D=16 C=2 M=32"


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with layout, loss_agg, model flags and counts; see configs/."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help=f"Such as '{_EXAMPLE}'; D and C are also read as DP and CP.")
    ] = None,
    loss_agg_mode: Annotated[str | None, typer.Option(help="See `megatron-lossagg modes`.")] = None,
    returns: Annotated[
        str | None, typer.Option(help="auto, loss (two values) or loss_and_num_tokens (three).")
    ] = None,
    cp_gradient: Annotated[
        str | None, typer.Option(help="local, replicated-value or gathered.")
    ] = None,
    calculate_per_token_loss: Annotated[
        bool | None, typer.Option(help="The flag of the model's config.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also start the layout's ranks here, on CPUs, and measure it."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain what Megatron-Core does to a returned loss, and what the plugin does about it.

    Prints the regime, each factor with where it comes from, the checksum, and what would go wrong
    without compensation. Exits with 1 if the setting is refused or measured to be different, with
    2 on wrong arguments.
    """
    try:
        case = DoctorCase.load(config).with_overrides(
            layout=layout,
            loss_agg_mode=loss_agg_mode,
            returns=returns,
            cp_gradient=cp_gradient,
            calculate_per_token_loss=calculate_per_token_loss,
        )
        if measure and case.layout.world_size > _MAX_MEASURED_RANKS:
            raise ValueError(
                f"--measure starts a process per rank, and '{case.layout}' has "
                f"{case.layout.world_size}; at most {_MAX_MEASURED_RANKS}. Measure a smaller "
                "layout of the same kind, or call aggregator.measure() in the job"
            )
    except (ImportError, OSError, TypeError, ValueError) as error:
        typer.echo(f"doctor: {error}", err=True)
        raise typer.Exit(2) from None
    if case.given_layout is None and not as_json:
        typer.echo(
            f"No layout was given: this is about '{case.layout}', one rank and one microbatch. "
            f"Give yours: --layout '{_EXAMPLE}', or `layout:` in the file of --config.\n"
        )
    try:
        diagnosis = _diagnose(case)
        measured = _measure(case) if measure else None
    except LossAggError as error:
        if as_json:
            typer.echo(json.dumps({"refused": str(error)}))
        else:
            Console(soft_wrap=True).print(f"[bold red]REFUSED[/] in '{case.layout}':", end=" ")
            typer.echo(str(error))
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_as_json(case, diagnosis, measured), indent=2))
    else:
        _print(case, diagnosis, measured)


def _diagnose(case: DoctorCase) -> Diagnosis:
    return diagnose(
        case.model_flags(),
        case.groups(),
        case.mode_spec,
        case.layout.num_microbatches,
        returns=case.loss_agg.returns,
        cp_gradient=case.loss_agg.cp_gradient,
        counts=case.counts,
    )


def _measure(case: DoctorCase) -> float:
    """The gradient over the returned losses, on real ranks, over what it should be: 1."""
    from megatron_lossagg.testing.ranks.rank_pool import RankPool
    from megatron_lossagg.verification.measured import measured_ratio

    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with RankPool(case.layout.world_size) as pool:
        ratios = pool.run(
            measured_ratio,
            case.layout,
            case.calculate_per_token_loss,
            case.loss_agg.returns,
            case.loss_agg.cp_gradient,
        )
    return ratios[0]


def _print(case: DoctorCase, diagnosis: Diagnosis, measured: float | None) -> None:
    console = Console()
    c = diagnosis.contract
    flag = "on" if case.calculate_per_token_loss else "off"
    console.print(f"[bold]Regime {c.regime}[/]: calculate_per_token_loss is {flag}, ", end="")
    console.print(f"loss_func returns {diagnosis.returns}", highlight=False)
    console.print(
        f"{case.layout}: {case.layout.world_size} ranks, D={c.dp_size}, C={c.cp_size}, "
        f"M={diagnosis.num_microbatches}, cp_gradient={c.cp_gradient}\n",
        highlight=False,
    )
    _print_factors(console, "What Megatron does to a returned loss", diagnosis.megatron)
    _print_factors(
        console, "What the plugin multiplies S, its part of the sum, by", diagnosis.plugin
    )
    console.print(f"{case.checksum_text(diagnosis.checksum)}\n", highlight=False)
    table = Table("without it you would", "gradient", "which means", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    for mistake in diagnosis.mistakes:
        ratio = "varies" if mistake.ratio is None else f"x {mistake.ratio}"
        table.add_row(mistake.what, ratio, mistake.effect)
    console.print(table)
    if measured is not None:
        console.print(
            f"[bold green]Measured[/] on {case.layout.world_size} CPU ranks: the gradient arrives "
            f"{measured:.9g} times as large as it should.",
            highlight=False,
        )


def _print_factors(console: Console, title: str, factors: tuple[Factor, ...]) -> None:
    table = Table(
        "factor", "value", "where from", title=title, title_justify="left", box=box.SIMPLE_HEAD
    )
    table.columns[1].justify = "right"
    for factor in factors:
        value = "?" if factor.value is None else f"{factor.value:.6g}"
        table.add_row(factor.symbol, value, factor.origin)
    if len(factors) > 1 and all(factor.value is not None for factor in factors):
        product = 1.0
        for factor in factors:
            product *= factor.value or 0.0
        table.add_section()
        table.add_row("together", f"{product:.6g}", "")
    console.print(table)


def _as_json(case: DoctorCase, diagnosis: Diagnosis, measured: float | None) -> dict[str, Any]:
    return {
        "layout": str(case.layout),
        "layout_is_assumed": case.given_layout is None,
        "loss_agg": case.loss_agg.to_dict(),
        "regime": diagnosis.contract.regime,
        "returns": diagnosis.returns,
        "megatron": [asdict(factor) for factor in diagnosis.megatron],
        "plugin": [asdict(factor) for factor in diagnosis.plugin],
        "loss_factor": diagnosis.contract.loss_factor(diagnosis.num_microbatches),
        "checksum": diagnosis.checksum,
        "mistakes": [
            {
                "what": m.what,
                "ratio": None if m.ratio is None else float(m.ratio),
                "effect": m.effect,
            }
            for m in diagnosis.mistakes
        ],
        "measured": measured,
    }
