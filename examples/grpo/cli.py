"""What the two commands share: their options, and how a run is started and ends.

Every rank imports the command's script, so this imports nothing that takes long to load.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from grpo.config import TrainingConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

_POLICY = "loss_agg.terms.policy"

# Flag, type, the option of the YAML file that it overrides, help.
_FLAGS: tuple[tuple[str, type, str, str], ...] = (
    ("--steps", int, "steps", "training steps of the whole run"),
    ("--tp", int, "layout.tp", "tensor-parallel size"),
    ("--pp", int, "layout.pp", "pipeline-parallel size"),
    ("--vpp", int, "layout.vpp", "model chunks per pipeline rank"),
    ("--dp", int, "layout.dp", "data-parallel size"),
    ("--cp", int, "layout.cp", "context-parallel size"),
    ("--micro-batch-size", int, "micro_batch_size", "sequences in a microbatch"),
    ("--loss-agg-mode", str, f"{_POLICY}.loss_agg_mode", "of the policy loss"),
    (
        "--loss-scale-factor",
        float,
        "loss_agg.terms.policy.loss_scale_factor",
        "L of seq-mean-token-sum-norm",
    ),
    (
        "--norm-semantics",
        str,
        "loss_agg.terms.policy.norm_semantics",
        "of that mode: sum or seq-mean",
    ),
    ("--lr", float, "optimizer.lr", "learning rate"),
    ("--seed", int, "seed", "seed of weights, prompts and sampling"),
    ("--save-every", int, "save_every", "steps between checkpoints; 0: at the end"),
)


def make_parser(description: str, default_config: str) -> argparse.ArgumentParser:
    """A parser with the options that every kind of run has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"YAML file with all options (default: configs/{default_config}, or with --resume the "
        "options that the run was started with)",
    )
    parser.set_defaults(default_config=CONFIGS / default_config)
    for flag, kind, option, text in _FLAGS:
        metavar = {int: "N", float: "X", str: "NAME"}[kind]
        parser.add_argument(flag, type=kind, dest=option, metavar=metavar, help=text)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="any option of the YAML file, such as model.num_layers=4; may be repeated",
    )
    parser.add_argument(
        "--import",
        dest="import_modules",
        metavar="MODULES",
        help="modules that register modes of your own (register_mode), separated by commas; also "
        "in the current folder. Every rank imports them",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the run (default: a new one in runs/, named by the run)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out (default: the last one in runs/)",
    )
    return parser


def import_modes(arguments: argparse.Namespace) -> None:
    """Import the modules of --import; ranks inherit the variable that names them.

    Raises:
        ValueError: one of them cannot be imported.
    """
    from megatron_lossagg.modes import IMPORT_VARIABLE, import_named_modules

    if arguments.import_modules is not None:
        os.environ[IMPORT_VARIABLE] = arguments.import_modules
    import_named_modules()


def config_file_of(arguments: argparse.Namespace, name_suffix: str = "") -> Path:
    """--config; without it, with --resume, the options of the run; else the default file.

    `name_suffix` is what the run's name adds to that of the default file.
    """
    from grpo.run_folder import saved_config

    if arguments.config is not None:
        return arguments.config
    saved = None
    if arguments.resume:
        saved = saved_config(arguments.default_config.stem + name_suffix, arguments.out)
    return arguments.default_config if saved is None else saved


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that the command line sets, for `load_config`: from --set, then from flags.

    Raises:
        ValueError: a --set is not OPTION=VALUE, or its value is not YAML.
    """
    import yaml

    overrides: dict[str, Any] = {}
    for setting in arguments.set:
        option, equals, value = setting.partition("=")
        if not equals or not option:
            raise ValueError(f"--set {setting}: expected OPTION=VALUE, such as optimizer.lr=0.001.")
        try:
            overrides[option] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {setting}: {value!r} is not YAML ({error}).") from error
    given = {option: getattr(arguments, option) for _, _, option, _ in _FLAGS}
    return overrides | {option: value for option, value in given.items() if value is not None}


def run_command(
    load: Callable[[], TrainingConfig],
    rank_main: Callable[..., bool],
    out: Path | None,
    *,
    resume: bool,
    open_folder: Callable[..., Path] | None = None,
    subject: str | None = None,
) -> int:
    """Check what can be checked, start the ranks, and turn what happens into an exit code.

    Args:
        load: reads and checks the configuration; raises ValueError.
        rank_main: what every rank runs: (config, folder, resume) -> whether it was stopped early.
        out: the run's folder, None for one in runs/.
        resume: go on with the run in that folder.
        open_folder: (config, out, resume=) -> the folder; None: `open_run_folder`.
        subject: what the first line says is done; None: the terms of the objective.
    """
    from grpo.launch import (
        JobFailed,
        is_first_process,
        is_rank_of_torchrun,
        launch,
        on_first_process,
    )
    from grpo.run_folder import open_run_folder

    open_folder = open_run_folder if open_folder is None else open_folder
    try:
        config = load()
        world_size = config.layout.world_size
        folder = on_first_process(partial(open_folder, config, out, resume=resume), world_size)
    except ValueError as error:
        if is_first_process():
            print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if is_first_process():
        print(_headline(config, folder, subject or _objective_text(config)), flush=True)
    try:
        is_stopped = launch(rank_main, config, folder, resume, world_size=world_size, out=folder)
    except JobFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("Ended at once; what came after the last checkpoint is lost.", file=sys.stderr)
        return EXIT_INTERRUPTED
    # torchrun would report a rank with another exit code than 0 as a failure.
    return EXIT_INTERRUPTED if is_stopped and not is_rank_of_torchrun() else 0


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process with what a command returns; Ctrl-C before ranks run is no stack trace."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _number_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _objective_text(config: TrainingConfig) -> str:
    terms = (f"{term.name} {term.loss_agg_mode}" for term in config.loss_agg.terms)
    return f"terms {', '.join(terms)}"


def _headline(config: TrainingConfig, folder: Path, subject: str) -> str:
    layout = config.layout.with_num_microbatches(config.num_microbatches)
    return (
        f"{config.name}: {_number_of(config.layout.world_size, 'rank')} ({layout}), "
        f"{config.sequences_per_step} sequences a step, {subject}, folder {folder}"
    )
