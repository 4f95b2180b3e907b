"""`megatron-lossagg verify`: the real schedules against a one-process reference."""

from __future__ import annotations

import json
import os
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from megatron_lossagg.cli.verify.config import VerifyConfig
from megatron_lossagg.cli.verify.releases_table import verify_releases
from megatron_lossagg.cli.verify.table import Outcome, as_json, print_table, with_progress
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.ranks.rank_pool import RankPool
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import DEFAULT_LAYOUTS, CaseResult
from megatron_lossagg.verification.faults import fault_names

Fault = Enum("Fault", {name: name for name in fault_names()}, type=str)  # type: ignore[misc]


def verify(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with these options (underscores for '-'); flags override it."),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            help="Layouts, separated by ';', such as 'PP=2 D=2 M=4; C=4 M=2'. Default: "
            f"{len(DEFAULT_LAYOUTS)} of them."
        ),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="Modes, separated by commas. Default: all.")
    ] = None,
    regimes: Annotated[
        str | None,
        typer.Option(help="R1, R2 (calculate_per_token_loss off), R3, R4 (on). Default: R1,R3."),
    ] = None,
    planning: Annotated[
        str | None,
        typer.Option(help="begin_step, wrap (the weights ride in loss_mask). Default: both."),
    ] = None,
    packed: Annotated[
        bool | None,
        typer.Option(
            "--packed/--no-packed",
            help="Packed sequences instead of padded rows: with cu_seqlens, and with "
            "cu_seqlens_padded. Default: padded rows.",
        ),
    ] = None,
    cp_gradient: Annotated[
        str | None,
        typer.Option(
            help="How token losses are made where C > 1: local (each rank its part), "
            "replicated-value (all of them on every rank, gradient in its part), gathered (through "
            "a gather whose backward sums). Default: local."
        ),
    ] = None,
    plant: Annotated[
        Fault | None,
        typer.Option(
            metavar="FAULT",
            help="Plant a fault in the plugin, to see that this command finds it: "
            f"{', '.join(fault_names())}.",
        ),
    ] = None,
    print_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a rank counts as hung.")
    ] = 120,
    releases: Annotated[
        str | None,
        typer.Option(
            help="Releases of megatron-core to download and run on instead of the installed one, "
            "such as '0.13.1,0.19.2', or 'all' (8). Default layouts are then 3."
        ),
    ] = None,
    releases_dir: Annotated[
        Path, typer.Option(help="Where downloaded releases are kept, and looked for.")
    ] = Path(".releases"),
) -> None:
    """Prove on this machine that gradients and reported losses are those of the global batch.

    Starts CPU processes, drives the installed Megatron-Core's own schedules, DDP and
    finalize_model_grads with a small float64 GPT on a ragged batch, and compares the gradient of
    the whole model and the reported loss of every mode with plain autograd in one process. No GPU
    is used. Exits with 1 if an error is above the bound, with 2 on wrong arguments.
    """
    flags = {
        "layouts": layouts,
        "modes": modes,
        "regimes": regimes,
        "planning": planning,
        "packed": packed,
        "cp_gradient": cp_gradient,
        "releases": releases,
    }
    try:
        chosen = VerifyConfig.load(config, flags)
    except ValueError as error:
        typer.echo(f"verify: {error}", err=True)
        raise typer.Exit(2) from None
    # Of the ranks: Megatron's, about its GPU paths.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    fault = None if plant is None else plant.value
    if chosen.releases:
        if not verify_releases(
            chosen.releases,
            releases_dir,
            chosen.cases(),
            chosen.plans(),
            fault=fault,
            timeout_s=timeout,
            as_json=print_json,
        ):
            raise typer.Exit(1)
        return
    outcome = run_config(chosen, fault, timeout, show_progress=not print_json)
    if print_json:
        typer.echo(json.dumps(as_json(outcome), indent=2))
    else:
        print_table(outcome, chosen.modes)
    if not outcome.passed:
        raise typer.Exit(1)


def run_config(
    config: VerifyConfig, fault: str | None, timeout: float, *, show_progress: bool
) -> Outcome:
    """Start ranks for the largest layout and run all cases on them."""
    cases = config.cases()
    results: list[CaseResult] = []
    failure: LossAggError | None = None
    started = time.monotonic()
    try:
        with RankPool(max(case.layout.world_size for case in cases), timeout_s=timeout) as pool:
            running = run_cases(pool, cases, config.plans(), fault=fault)
            results.extend(with_progress(running, len(cases), show=show_progress))
    except LossAggError as error:
        failure = error
    return Outcome(results, failure, time.monotonic() - started)
