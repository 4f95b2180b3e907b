"""The folder of a run: which one, and whether a run in it can go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo.checkpoint import latest_step
from grpo.config import TrainingConfig
from grpo.loop import CHECKPOINTS
from grpo.stopping import stop_file

RUNS = Path(__file__).resolve().parents[2] / "runs"
_CONFIG = "config.yaml"
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
    if out is None:
        last, next_free = _folders(config.name)
        out = last if resume else next_free
    out = _shown(out)
    if resume:
        _check_can_go_on(out, config)
    elif latest_step(out / CHECKPOINTS) is not None:
        raise ValueError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
        )
    _note(config, out)
    return out


def open_comparison_folder(config: TrainingConfig, out: Path | None, *, resume: bool) -> Path:
    """As `open_run_folder`, for a comparison: its folder holds those of its runs.

    Raises:
        ValueError: another comparison would be mixed with this one; or there is none to resume.
    """
    if out is None:
        last, next_free = _folders(config.name)
        out = last if resume else next_free
    out = _shown(out)
    is_used = (out / _CONFIG).is_file()
    if is_used and not resume:
        raise ValueError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
        )
    if resume and not is_used:
        raise ValueError(f"--resume: there is no comparison in {out}. Name its folder with --out.")
    if resume:
        _check_same_options(out, config)
    _note(config, out)
    return out


def saved_config(name: str, out: Path | None) -> Path | None:
    """The options that a run was started with: of the one in `out`, or of the last one by name."""
    path = (_folders(name)[0] if out is None else out) / _CONFIG
    return path if path.is_file() else None


def _note(config: TrainingConfig, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stop_file(out).unlink(missing_ok=True)
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    (out / _CONFIG).write_text(text, encoding="utf-8")


def _folders(name: str) -> tuple[Path, Path]:
    """Of runs/NAME, runs/NAME-2, ...: the last one in use (or the first) and the first free one."""
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
    before = _flat(yaml.safe_load((out / _CONFIG).read_text(encoding="utf-8")))
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
