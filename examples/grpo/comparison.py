"""The same training in each aggregation mode, from the same seeds: what the mode alone changes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo.checkpoint import latest_step
from grpo.config import GrpoConfig
from grpo.jobs import GOAL, run_online
from grpo.loop import CHECKPOINTS
from grpo.metrics import Metrics, read_metrics
from grpo.run_folder import note_config, num_seeds_of
from grpo.terms import POLICY

PICTURE, TABLE = "comparison.png", "comparison.md"
_NUM_LAST_STEPS = 10
_NUM_FIRST_STEPS = 30

# Of the policy term. With L = the longest response, the last one is the Dr.GRPO loss.
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


# What a comparison sets.
MODE_OPTIONS = tuple(
    f"loss_agg.terms.{POLICY}.{name}"
    for name in ("loss_agg_mode", "loss_scale_factor", "norm_semantics")
)


@dataclass(frozen=True)
class Run:
    """One training of a comparison."""

    mode: str
    config: GrpoConfig

    @property
    def folder_name(self) -> str:
        """Its folder within the comparison's."""
        return f"{self.mode}-seed{self.config.seed}"


def runs_of(config: GrpoConfig, num_seeds: int) -> list[Run]:
    """The runs: every mode with the seeds config.seed, config.seed + 1, ..., all else as it is."""
    return [
        Run(mode, dataclasses.replace(_in_mode(config, mode), seed=config.seed + offset))
        for offset in range(num_seeds)
        for mode in MODES
    ]


def _in_mode(config: GrpoConfig, mode: str) -> GrpoConfig:
    is_norm = mode == "seq-mean-token-sum-norm"
    options: dict[str, Any] = {
        "loss_agg_mode": mode,
        "loss_scale_factor": float(config.task.max_response_length) if is_norm else None,
        "norm_semantics": "seq-mean" if is_norm else "sum",
    }
    terms = tuple(
        dataclasses.replace(term, **options) if term.name == POLICY else term
        for term in config.loss_agg.terms
    )
    return dataclasses.replace(config, loss_agg=dataclasses.replace(config.loss_agg, terms=terms))


def run_comparison(config: GrpoConfig, out: Path, resume: bool) -> bool:
    """Train in every mode with every seed, on one rank; returns whether it was stopped early.

    A run whose folder holds all its steps is left alone, one with some of them goes on.
    """
    num_seeds = num_seeds_of(out)
    runs = runs_of(config, num_seeds)
    is_first = dist.get_rank() == 0
    for number, run in enumerate(runs, start=1):
        folder = out / run.folder_name
        step = latest_step(folder / CHECKPOINTS)
        if step == run.config.steps:
            continue
        if is_first:
            print(f"\n[{number}/{len(runs)}] {run.mode}, seed {run.config.seed}", flush=True)
            note_config(run.config, folder)
        # Nobody may look for a checkpoint while another rank writes one.
        dist.barrier()
        if run_online(run.config, folder, resume=step is not None, comparison=out):
            return True
        dist.barrier()
    if is_first:
        histories = {
            mode: [
                read_metrics(out / r.folder_name / "metrics.jsonl") for r in runs if r.mode == mode
            ]
            for mode in MODES
        }
        table = comparison_table(histories)
        (out / TABLE).write_text(table + "\n", encoding="utf-8")
        draw_comparison(out / PICTURE, _title(config, num_seeds), histories, config)
        print(f"\n{table}\n\nPicture: {out / PICTURE}", flush=True)
    return False


def _title(config: GrpoConfig, num_seeds: int) -> str:
    layout = config.layout.with_num_microbatches(config.num_microbatches)
    lines = "one seed, smoothed over 9 steps"
    if num_seeds > 1:
        lines = f"line: mean of {num_seeds} seeds, smoothed over 9 steps; band: smallest to largest"
    return f"GRPO on the task 'count', {layout}: the policy loss in four aggregation modes\n{lines}"


def comparison_table(histories: dict[str, list[list[Metrics]]]) -> str:
    """A Markdown table: per mode the mean over seeds and, in brackets, smallest and largest."""
    columns: dict[str, Callable[[Sequence[Metrics]], float | None]] = {
        f"reward, last {_NUM_LAST_STEPS} steps": lambda h: _mean(h[-_NUM_LAST_STEPS:], "reward"),
        f"first step at {GOAL}": lambda h: next(
            (m["step"] for m in h if m["reward"] >= GOAL), None
        ),
        f"length, first {_NUM_FIRST_STEPS} steps": lambda h: _mean(
            h[:_NUM_FIRST_STEPS], "response_length"
        ),
        f"length of worse responses, first {_NUM_FIRST_STEPS}": lambda h: _mean(
            h[:_NUM_FIRST_STEPS], "length_worse"
        ),
        "length at the end": lambda h: _mean(h[-_NUM_LAST_STEPS:], "response_length"),
        "gradient norm, median": lambda h: statistics.median(m["grad_norm"] for m in h),
    }
    lines = [["mode", *columns], ["---", *["---:"] * len(columns)]]
    for mode, runs in histories.items():
        cells = [_spread([of(history) for history in runs]) for of in columns.values()]
        lines.append([f"`{mode}`", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(history: Sequence[Metrics], name: str) -> float:
    return sum(m[name] for m in history) / len(history)


def _spread(values: Sequence[float | None]) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "never"
    text = f"{statistics.mean(reached):.3g} ({min(reached):.3g} to {max(reached):.3g})"
    missing = len(values) - len(reached)
    return f"{text}; {missing} of {len(values)} never" if missing else text


def draw_comparison(
    path: Path, title: str, histories: dict[str, list[list[Metrics]]], config: GrpoConfig
) -> None:
    """Draw reward, lengths and gradient norm of all modes side by side."""
    from grpo.picture import Band, BandPanel, draw_bands

    panels = (
        BandPanel("reward", "Reward", "mean reward (1 = right answer)", limits=(0.0, 1.04)),
        BandPanel(
            "response_length",
            "Length of responses",
            "mean length (tokens, with EOS)",
            line=(config.task.mean_answer_length, "right answers, on average"),
        ),
        BandPanel(
            "length_worse",
            "Length of responses with an advantage below 0",
            "mean length (tokens, with EOS)",
        ),
        BandPanel(
            "grad_norm", "Gradient norm", "norm before clipping (log scale)", is_logarithmic=True
        ),
    )
    bands = [Band(mode, runs) for mode, runs in histories.items()]
    draw_bands(path, title, panels, bands)
