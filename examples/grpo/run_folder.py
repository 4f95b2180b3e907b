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
        names = [config.name, *(f"{config.name}-{i}" for i in range(2, 10_000))]
        folders = [RUNS / name for name in names]
        first_free = next(i for i, folder in enumerate(folders) if not folder.exists())
        out = folders[max(0, first_free - 1) if resume else first_free]
    out = _shown(out)
    if resume:
        _check_can_go_on(out, config)
    elif latest_step(out / CHECKPOINTS) is not None:
        raise ValueError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
        )
    out.mkdir(parents=True, exist_ok=True)
    stop_file(out).unlink(missing_ok=True)
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    (out / _CONFIG).write_text(text, encoding="utf-8")
    return out


def _check_can_go_on(out: Path, config: TrainingConfig) -> None:
    step = latest_step(out / CHECKPOINTS)
    if step is None:
        raise ValueError(
            f"--resume: there is no checkpoint in {out}. Name the folder of a run with --out."
        )
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
    if step >= config.steps:
        raise ValueError(
            f"The run in {out} has all its steps: its checkpoint is of step {step}. To train on, "
            f"give --steps more than {step}."
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(path: Path) -> Path:
    """Relative to the current folder where that is shorter to read."""
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
