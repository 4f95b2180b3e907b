"""`megatron-lossagg doctor`: what a layout and its flags do to a loss, and how it is undone."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_lossagg.cli.doctor.case import DoctorCase
from megatron_lossagg.cli.doctor.diagnosis import Diagnosis, diagnose
from megatron_lossagg.cli.doctor.showing import (
    new_console,
    print_diagnosis,
    print_refusal,
    print_text,
)
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
    loss_agg_mode: Annotated[str | None, typer.Option(help="See the subcommand `modes`.")] = None,
    returns: Annotated[
        str | None, typer.Option(help="auto, loss (two values) or loss_and_num_tokens (three).")
    ] = None,
    cp_gradient: Annotated[
        str | None, typer.Option(help="local, replicated-value or gathered.")
    ] = None,
    calculate_per_token_loss: Annotated[
        bool,
        typer.Option("--calculate-per-token-loss", help="The model's config has this flag on."),
    ] = False,
    no_calculate_per_token_loss: Annotated[
        bool,
        typer.Option(
            "--no-calculate-per-token-loss", help="It has it off, whatever --config says."
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also start the layout's ranks here, on CPUs, and measure it."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain what Megatron-Core does to a returned loss, and what the plugin does about it.

    Prints the regime, each factor with where it comes from, the checksum, and
    what would go wrong without compensation. Exits with 1 if the setting is
    refused or measured to be different, with 2 on wrong arguments.
    """
    try:
        if calculate_per_token_loss and no_calculate_per_token_loss:
            raise ValueError(
                "--calculate-per-token-loss and --no-calculate-per-token-loss exclude each other"
            )
        is_flag_given = calculate_per_token_loss or no_calculate_per_token_loss
        case = DoctorCase.load(config).with_overrides(
            layout=layout,
            loss_agg_mode=loss_agg_mode,
            returns=returns,
            cp_gradient=cp_gradient,
            calculate_per_token_loss=calculate_per_token_loss if is_flag_given else None,
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
    console = new_console()
    if case.given_layout is None and not as_json:
        print_text(
            console,
            f"No layout was given: this is about '{case.layout}', one rank and one microbatch. "
            f"Give yours: --layout '{_EXAMPLE}', or `layout:` in the file of --config.\n",
        )
    try:
        diagnosis = _diagnose(case)
        measured = _measure(case) if measure else None
    except LossAggError as error:
        if as_json:
            typer.echo(json.dumps({"refused": str(error)}))
        else:
            print_refusal(console, str(case.layout), str(error))
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_as_json(case, diagnosis, measured), indent=2))
    else:
        print_diagnosis(console, case, diagnosis, measured)


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
