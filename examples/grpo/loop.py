"""The training loop, on every rank: a batch, its updates, what is shown and kept of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from grpo.batch import Batch
from grpo.checkpoint import load_checkpoint, save_checkpoint
from grpo.config import TrainingConfig
from grpo.launch import is_rank_of_torchrun
from grpo.metrics import Metrics, MetricsWriter
from grpo.picture import Panel, draw
from grpo.progress import Column, RunDisplay
from grpo.stopping import StopRequest
from grpo.trainer import Trainer

CHECKPOINTS = "checkpoints"
PICTURE = "training.png"


class BatchSource(Protocol):
    """Where batches come from: sampled (`OnlineBatches`) or recorded (`OfflineBatches`)."""

    vocab_size: int
    row_width: int

    def batch(self, step: int, trainer: Trainer) -> Batch:
        """This replica's part of the batch of a step, 1, 2, ..."""


@dataclass(frozen=True)
class View:
    """How a kind of run is shown.

    Attributes:
        title: of the picture.
        columns: of the display.
        panels: of the picture.
        summarize: a line on what the run achieved.
    """

    title: str
    columns: Sequence[Column]
    panels: Sequence[Panel]
    summarize: Callable[[Sequence[Metrics]], str]


def train(
    config: TrainingConfig,
    batches: BatchSource,
    view: View,
    out: Path,
    *,
    resume: bool,
    comparison: Path | None = None,
) -> bool:
    """Train to `config.steps`, or until somebody asks to stop. All ranks call it.

    `comparison` is the folder of the comparison that the run is part of: a request to stop is left
    there, and not in `out`, the run's own.

    Returns:
        Whether the run was stopped before its last step.
    """
    trainer = Trainer(
        config, vocab_size=batches.vocab_size, max_sequence_length=batches.row_width + 1
    )
    last_step = load_checkpoint(out / CHECKPOINTS, trainer) if resume else 0
    stop = StopRequest(out if comparison is None else comparison, trainer.device)
    if is_rank_of_torchrun():
        stop.listen_to_signals()
    is_stopped = False
    recorder = _Recorder(config, view, out, last_step) if dist.get_rank() == 0 else None
    with ExitStack() as stack:
        if recorder is not None:
            stack.enter_context(recorder)
        for step in range(last_step + 1, config.steps + 1):
            started = time.perf_counter()
            batch = batches.batch(step, trainer)
            metrics = {"step": step, **train_on_batch(batch, trainer, config, step)}
            metrics["seconds"] = time.perf_counter() - started
            metrics["tokens_per_second"] = metrics["num_tokens"] / metrics["seconds"]
            _check_is_finite(metrics)
            if recorder is not None:
                recorder.add(metrics)
            is_stopped = stop.is_made() and step < config.steps
            if is_stopped:
                break
            if config.save_every and step % config.save_every == 0 and step < config.steps:
                save_checkpoint(out / CHECKPOINTS, step, trainer)
    save_checkpoint(out / CHECKPOINTS, step, trainer)
    if recorder is not None:
        how = f"--resume --out {out}"
        recorder.conclude(
            is_stopped, how if comparison is None else f"--compare --resume --out {comparison}"
        )
    stop.clear()
    return is_stopped


def train_on_batch(batch: Batch, trainer: Trainer, config: TrainingConfig, step: int) -> Metrics:
    """The updates on one batch, and the metrics of the step: means over the global batch.

    Communicates over dp, for the metrics, and as `Trainer.update`.
    """
    lengths = batch.response_lengths.double()
    is_worse = batch.advantages < 0
    is_better = batch.advantages > 0
    ones = torch.ones_like(lengths)
    totals = torch.stack(
        [
            *(x.sum() for x in (batch.rewards.double(), lengths, ones)),
            *(x[is_better].sum() for x in (lengths, ones)),
            *(x[is_worse].sum() for x in (lengths, ones)),
        ]
    )
    dist.all_reduce(totals, group=trainer.groups.dp)
    reward, num_tokens, num_sequences, *better_and_worse = totals.tolist()
    tokens_better, num_better, tokens_worse, num_worse = better_and_worse
    updates = [trainer.update(batch, step) for _ in range(config.algorithm.updates_per_step)]
    means = {name: sum(u[name] for u in updates) / len(updates) for name in trainer.metric_names}
    return {
        "reward": reward / num_sequences,
        "response_length": num_tokens / num_sequences,
        # Of responses whose advantage is above 0, and below 0; 0 if there is none.
        "length_better": tokens_better / max(1, num_better),
        "length_worse": tokens_worse / max(1, num_worse),
        "num_tokens": num_tokens,
        **means,
    }


def _check_is_finite(metrics: Metrics) -> None:
    """Raise on a loss or gradient that is none: every later step would be lost, too."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            raise ArithmeticError(
                f"{name} is {metrics[name]} at step {int(metrics['step'])}: training has diverged. "
                "Try a lower optimizer.lr; checkpoints before this step (save_every) are intact."
            )


class _Recorder:
    """What the first rank does with the steps: it shows, writes and, at the end, draws them."""

    def __init__(self, config: TrainingConfig, view: View, out: Path, last_step: int) -> None:
        self._config, self._view, self._out = config, view, out
        self._writer = MetricsWriter(out, resume_after=last_step)
        self._display = RunDisplay(view.columns, config.steps, self._writer.history)

    def __enter__(self) -> _Recorder:
        self._display.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._display.__exit__(*exc_info)
        self._writer.close()

    def add(self, metrics: Metrics) -> None:
        self._writer.write(metrics)
        self._display.step(metrics)

    def conclude(self, is_stopped: bool, how_to_go_on: str) -> None:
        """Draw the picture and say what came out."""
        picture = self._out / PICTURE
        history = self._writer.history
        draw(picture, self._view.title, self._view.panels, history)
        if is_stopped:
            done = int(history[-1]["step"])
            print(
                f"Stopped after step {done} of {self._config.steps}; the run is saved. To go on: "
                f"{how_to_go_on}"
            )
        print(f"{self._view.summarize(history)} Picture: {picture}", flush=True)
