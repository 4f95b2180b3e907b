"""The two jobs, as each rank runs them: what they train on and how they are shown."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from grpo.config import GrpoConfig, OfflineConfig
from grpo.metrics import Metrics

GOAL = 0.9
_NUM_LAST_STEPS = 10


def run_online(
    config: GrpoConfig, out: Path, resume: bool, *, comparison: Path | None = None
) -> bool:
    """GRPO on sampled responses, on one rank; returns whether it was stopped early.

    `comparison` is the folder of the comparison that the run is part of.
    """
    _hush()
    from grpo.loop import View, train
    from grpo.online import OnlineBatches
    from grpo.picture import Line, Panel
    from grpo.progress import Column

    view = View(
        title=f"GRPO on the task 'count', {_layout_text(config)}, {config.policy_mode}",
        columns=(
            Column("reward", "reward (0 to 1)", ".3f"),
            Column("response_length", "response (tokens)", ".2f"),
            Column("loss", "loss", ".4f"),
            Column("tokens_per_second", "tokens/s", ",.0f"),
        ),
        panels=(
            Panel(
                "reward",
                "Reward of sampled responses",
                "mean reward (1 = right answer)",
                lines=(Line(GOAL, f"goal: {GOAL}"),),
                limits=(0.0, 1.04),
                legend_location="lower right",
            ),
            Panel(
                "response_length",
                "Length of sampled responses",
                "mean length (tokens, with EOS)",
                lines=(Line(config.task.mean_answer_length, "right answers, on average"),),
                limits=(0.0, config.task.max_response_length + 0.4),
                legend_location="upper right",
            ),
        ),
        summarize=summarize_rewards,
    )
    return train(config, OnlineBatches(config), view, out, resume=resume, comparison=comparison)


def summarize_rewards(history: Sequence[Metrics]) -> str:
    """How far the reward has risen, and whether it has reached the goal."""
    rewards = [m["reward"] for m in history]
    last = rewards[-_NUM_LAST_STEPS:]
    reached = next((int(m["step"]) for m in history if m["reward"] >= GOAL), None)
    final = sum(last) / len(last)
    if final >= GOAL:
        verdict = f"reached: {GOAL} of the maximum, first at step {reached}"
    else:
        verdict = f"NOT reached: {GOAL} of the maximum (more --steps may help)"
    return (
        f"Reward {rewards[0]:.3f} at step {int(history[0]['step'])} -> {final:.3f} "
        f"(mean of the last {len(last)} steps). Goal {verdict}."
    )


def describe_data(config: OfflineConfig) -> str:
    """A line on the recorded responses; raises ValueError naming file and line of a bad one."""
    from grpo.offline import OfflineBatches, read_records

    return OfflineBatches(config, read_records(Path(config.data.path))).describe()


def run_offline(config: OfflineConfig, out: Path, resume: bool) -> bool:
    """GRPO on recorded responses, on one rank; returns whether it was stopped early."""
    _hush()
    from grpo.loop import View, train
    from grpo.offline import OfflineBatches, read_records
    from grpo.picture import Line, Panel
    from grpo.progress import Column

    view = View(
        title=f"Offline GRPO on {Path(config.data.path).name}, {_layout_text(config)}, "
        f"{config.policy_mode}",
        columns=(
            Column("loss", "loss", ".5f"),
            Column("advantage_gain", "gain (nats/token)", ".6f"),
            Column("kl_to_old", "KL to start (nats/token)", ".5f"),
            Column("grad_norm", "gradient norm", ".4f"),
            Column("response_length", "response (bytes)", ".1f"),
            Column("tokens_per_second", "tokens/s", ",.0f"),
        ),
        panels=(
            Panel(
                "advantage_gain",
                "How far better responses became likelier",
                "advantage x change of log-probability\n(nats per token, before each update)",
                lines=(Line(0.0, "starting policy"),),
            ),
            Panel(
                "kl_to_old",
                "Distance from the starting policy",
                "KL divergence (nats per token)",
            ),
        ),
        summarize=summarize_offline,
    )
    batches = OfflineBatches(config, read_records(Path(config.data.path)))
    return train(config, batches, view, out, resume=resume)


def summarize_offline(history: Sequence[Metrics]) -> str:
    """What was trained on, and how far from the starting policy it led."""
    last = history[-_NUM_LAST_STEPS:]
    loss, gain, kl = (
        sum(m[name] for m in last) / len(last) for name in ("loss", "advantage_gain", "kl_to_old")
    )
    return (
        f"{len(history)} steps on {sum(m['num_tokens'] for m in history):,.0f} response tokens. "
        f"Mean of the last {len(last)} steps: loss {loss:.5f}, gain {gain:.6f} and KL to the "
        f"starting policy {kl:.5f} nats per token."
    )


def _layout_text(config: GrpoConfig | OfflineConfig) -> str:
    return str(config.layout.with_num_microbatches(config.num_microbatches))


def _hush() -> None:
    """Keep Megatron's remarks on optional packages, once per rank, out of the display."""
    warnings.filterwarnings("ignore", module="megatron")
