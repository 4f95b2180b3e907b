"""The folder of a run: which one, and whether a run in it can go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo.checkpoint import latest_step
from grpo.config import TrainingConfig
from grpo.config_file import load_config
from grpo.loop import CHECKPOINTS
from grpo.stopping import stop_file

RUNS = Path(__file__).resolve().parents[2] / "runs"
_CONFIG, _COMPARISON = "config.yaml", "comparison.yaml"
DEFAULT_NUM_SEEDS = 3
# What may change when a run goes on: how long, how it is spread over ranks, where its data lies.
_MAY_CHANGE = ("name", "steps", "save_every", "micro_batch_size", "layout.", "data.path")


def open_run_folder(config: TrainingConfig, out: Path | None, *, resume: bool) -> Path:
    """The folder of a run, made if needed, with its configuration noted in it.

    Without `out` it is runs/NAME, runs/NAME-2, ...: the first that is free or, to resume, the last
    in use.

    Raises:
        ValueError: a run would be overwritten; or there is none to resume, or it was another one,
            or it has all its steps already.
    """
    out = _chosen(config, out, resume=resume)
    if (out / _COMPARISON).is_file():
        raise ValueError(f"{out} holds a comparison. Add --compare, or choose another --out.")
    if resume:
        _check_can_go_on(out, config)
    elif latest_step(out / CHECKPOINTS) is not None:
        raise ValueError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
        )
    note_config(config, out)
    return out


def open_comparison_folder(
    config: TrainingConfig, out: Path | None, *, resume: bool, num_seeds: int | None = None
) -> Path:
    """As `open_run_folder`, for a comparison: its folder holds those of its runs.

    Args:
        config: of its runs.
        out: the folder; None: one in runs/.
        resume: go on with the comparison in it.
        num_seeds: None: as the comparison was started, or `DEFAULT_NUM_SEEDS`.

    Raises:
        ValueError: another run would be mixed with this one; or there is none to resume, or it has
            more steps or seeds already.
    """
    if num_seeds is not None and num_seeds < 1:
        raise ValueError(f"--num-seeds {num_seeds} must be at least 1.")
    out = _chosen(config, out, resume=resume)
    is_comparison = (out / _COMPARISON).is_file()
    if (out / _CONFIG).is_file() and not (resume and is_comparison):
        kind, how = (
            ("comparison", "Add --resume to go on with it, or choose")
            if is_comparison
            else ("run without --compare", "Choose")
        )
        raise ValueError(f"{out} already holds a {kind}. {how} another --out.")
    if resume and not is_comparison:
        raise ValueError(f"--resume: there is no comparison in {out}. Name its folder with --out.")
    started_with = num_seeds_of(out) if resume else 0
    if resume:
        _check_same_options(out, config)
        steps = [latest_step(folder) or 0 for folder in out.glob(f"*/{CHECKPOINTS}")]
        if max(steps, default=0) > config.steps:
            raise ValueError(
                f"The comparison in {out} has runs of {max(steps)} steps: give --steps {max(steps)}"
                " or more."
            )
        if num_seeds is not None and num_seeds < started_with:
            raise ValueError(
                f"The comparison in {out} has {started_with} seeds: give --num-seeds "
                f"{started_with} or more, or leave it out."
            )
    note_config(config, out)
    number = num_seeds or started_with or DEFAULT_NUM_SEEDS
    (out / _COMPARISON).write_text(f"num_seeds: {number}\n", encoding="utf-8")
    return out


def num_seeds_of(out: Path) -> int:
    """Of the comparison in folder `out`."""
    return yaml.safe_load((out / _COMPARISON).read_text(encoding="utf-8"))["num_seeds"]


def saved_config(name: str, out: Path | None) -> Path | None:
    """The options that a run was started with: of the one in `out`, or of the last one by name."""
    path = (_folders(name)[0] if out is None else out) / _CONFIG
    return path if path.is_file() else None


def note_config(config: TrainingConfig, out: Path) -> None:
    """Make the folder and write the options of its run into it."""
    out.mkdir(parents=True, exist_ok=True)
    stop_file(out).unlink(missing_ok=True)
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    (out / _CONFIG).write_text(text, encoding="utf-8")


def _chosen(config: TrainingConfig, out: Path | None, *, resume: bool) -> Path:
    """`out`, or the folder in runs/: the last in use to resume, the first free one to start."""
    if out is None:
        last, next_free = _folders(config.name)
        out = last if resume else next_free
    return _shown(out)


def _folders(name: str) -> tuple[Path, Path]:
    """Of runs/NAME, runs/NAME-2, ...: the last one in use (or the first) and the first free one."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"name={name!r} cannot name a folder in {RUNS}. Change it, or pass --out.")
    folders = [RUNS / n for n in (name, *(f"{name}-{i}" for i in range(2, 10_000)))]
    first_free = next(i for i, folder in enumerate(folders) if not folder.exists())
    return folders[max(0, first_free - 1)], folders[first_free]


def _check_can_go_on(out: Path, config: TrainingConfig) -> None:
    step = latest_step(out / CHECKPOINTS)
    if step is None:
        raise ValueError(
            f"--resume: there is no checkpoint in {out}. Name the folder of a run with --out."
        )
    _check_same_options(out, config)
    if step >= config.steps:
        raise ValueError(
            f"The run in {out} has all its steps: its checkpoint is of step {step}. To train on, "
            f"give --steps more than {step}."
        )


def _check_same_options(out: Path, config: TrainingConfig) -> None:
    if not (out / _CONFIG).is_file():
        raise ValueError(f"--resume: there is no {_CONFIG} in {out}, so it is no run's folder.")
    # As options: a file of an earlier version lacks those that came later, which have defaults.
    before = _flat(load_config(type(config), out / _CONFIG).to_dict())
    now = _flat(config.to_dict())
    different = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(_MAY_CHANGE)
    ]
    if different:
        raise ValueError(
            f"The run in {out} cannot go on with other options ({'; '.join(different)}). Give it "
            "the options it had, or start a new run."
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif key == "terms":
            flat.update(_flat({term["name"]: term for term in value}, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(path: Path) -> Path:
    """Relative to the current folder where that is shorter to read."""
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
