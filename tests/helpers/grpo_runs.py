"""Runs of the example's commands: small options, a call in this process, what a run has logged."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo.metrics import TIMINGS, read_metrics

# As the default layout, PP=2 and DP=2, with little work.
SMALL = {
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "micro_batch_size": 4,
    "model.hidden_size": 16,
}


def settings(overrides: dict) -> list[str]:
    return [text for key, value in overrides.items() for text in ("--set", f"{key}={value}")]


def without_timings(out: Path) -> list[dict]:
    steps = read_metrics(out / "metrics.jsonl")
    assert steps
    return [{k: v for k, v in step.items() if k not in TIMINGS} for step in steps]


def call(main, monkeypatch, *arguments: object) -> int:
    """Call a command in this process."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    return main()
