"""Checkpoints with Megatron's `dist_checkpointing`: a stopped run goes on as if it had not stopped.

What is saved does not depend on the layout, so a run may go on under another one. There is no
random state in it: what is random in a step follows from the seed and the step's number.
"""

from __future__ import annotations

import json
import queue
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo.trainer import Trainer

_LATEST = "latest.json"


def save_checkpoint(folder: Path, step: int, trainer: Trainer) -> None:
    """Write model, optimizer and step, then drop the checkpoint before. All ranks call it."""
    from megatron.core import dist_checkpointing

    target = folder / f"step_{step:06d}"
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    dist.barrier()
    _write_from_this_process()
    dist_checkpointing.save(_state(step, trainer), str(target))
    dist.barrier()
    if dist.get_rank() == 0:
        # Renaming is atomic: `latest` always names a checkpoint that is complete.
        draft = folder / f"{_LATEST}.draft"
        draft.write_text(json.dumps({"step": step, "folder": target.name}) + "\n")
        draft.replace(folder / _LATEST)
        for other in folder.glob("step_*"):
            if other != target:
                shutil.rmtree(other)


def latest_step(folder: Path) -> int | None:
    """The step of the latest checkpoint in a folder, None without one."""
    latest = _read_latest(folder)
    return None if latest is None else int(latest["step"])


def load_checkpoint(folder: Path, trainer: Trainer) -> int:
    """Load the latest checkpoint; returns its step. All ranks call it."""
    from megatron.core import dist_checkpointing

    latest = _read_latest(folder)
    if latest is None:
        raise ValueError(f"There is no checkpoint in {folder} to go on from.")
    state = dist_checkpointing.load(
        _state(0, trainer, is_loading=True), str(folder / latest["folder"])
    )
    for index, chunk in enumerate(trainer.chunks):
        chunk.module.load_state_dict(state[f"model{index}"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _state(step: int, trainer: Trainer, is_loading: bool = False) -> dict[str, Any]:
    model = {  # without the DDP around it
        f"model{index}": chunk.module.sharded_state_dict()
        for index, chunk in enumerate(trainer.chunks)
    }
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading)
    return {**model, "optimizer": optimizer, "step": step}


def _read_latest(folder: Path) -> dict[str, Any] | None:
    path = folder / _LATEST
    return json.loads(path.read_text()) if path.exists() else None


def _write_from_this_process() -> None:
    """Keep Megatron's writer from starting a server process for its queue on every rank.

    Only asynchronous saves need it. It would outlive a rank that is killed, and it imports the main
    script anew. What is set is a cache of `filesystem_async`; a release without it is left alone.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "_results_queue"):
        filesystem_async._results_queue = queue.Queue()
