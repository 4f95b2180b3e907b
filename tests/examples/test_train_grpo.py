"""The two commands, run: what they leave behind, resuming, stopping, failing.

The property that matters most: a run that was stopped and resumed has, bit for bit, the numbers of
one that was not. One run starts ranks of its own; the others use those of the session's pool, which
saves the seconds that starting takes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpo.launch
import pytest
import torch
import train_grpo
import train_offline
from grpo.batch import Batch
from grpo.cli import CONFIGS, EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from grpo.comparison import MODES, run_comparison, runs_of
from grpo.config import GrpoConfig, OfflineConfig
from grpo.config_file import load_config
from grpo.jobs import describe_data, run_offline, run_online
from grpo.loop import train_on_batch
from grpo.metrics import TIMINGS, read_metrics
from grpo.run_folder import num_seeds_of, open_comparison_folder, open_run_folder
from grpo.trainer import Trainer

from megatron_lossagg.testing import RankFailure, RankPool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# As the default layout, PP=2 and DP=2, with little work.
SMALL = {
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "micro_batch_size": 4,
    "model.hidden_size": 16,
}
TIMEOUT_S = 120


def start(script: str, *arguments: object, **options) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # a process group of its own, to look for what it leaves behind
        **options,
    )


def settings(overrides: dict) -> list[str]:
    return [text for key, value in overrides.items() for text in ("--set", f"{key}={value}")]


def without_timings(out: Path) -> list[dict]:
    steps = read_metrics(out / "metrics.jsonl")
    assert steps
    return [{k: v for k, v in step.items() if k not in TIMINGS} for step in steps]


def group_is_gone(group: int) -> bool:
    """Whether no process of the group is left; ranks get a moment to end."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of the command that Ctrl-C stopped: its folder, exit code and output."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    process = start("train_grpo.py", "--steps", 500, "--out", out, *settings(SMALL))
    deadline = time.monotonic() + TIMEOUT_S
    while not read_metrics(out / "metrics.jsonl") and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert group_is_gone(process.pid)
    return out, process.returncode, output, errors


def test_ctrl_c_saves_and_says_so(stopped_run):
    out, code, output, errors = stopped_run
    assert code == EXIT_INTERRUPTED
    assert "Traceback" not in output + errors
    assert "Stopping after this step" in errors
    num_steps = len(without_timings(out))
    assert f"Stopped after step {num_steps} of 500" in output
    assert f"--resume --out {out}" in output
    assert not (out / "STOP").exists()


def test_a_run_leaves_metrics_a_picture_and_a_checkpoint(stopped_run):
    out, _, output, _ = stopped_run
    last = without_timings(out)[-1]
    assert 0 <= last["reward"] <= 1
    assert 1 <= last["response_length"] <= 10
    assert last["num_tokens"] == pytest.approx(16 * last["response_length"])
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {out / 'training.png'}" in output
    checkpoints = [path.name for path in (out / "checkpoints").glob("step_*")]
    assert checkpoints == [f"step_{last['step']:06d}"]
    assert list((out / "tensorboard").glob("events*"))
    # Plain lines where there is no terminal.
    assert "\x1b" not in output
    assert output.splitlines()[1].split()[:2] == ["step", "reward"]


def call(main, monkeypatch, *arguments: object) -> int:
    """Call a command in this process."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    return main()


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    stopped_run, rank_pool, monkeypatch, tmp_path
):
    class PoolOfTheSession:
        """Ranks that run already, in place of new ones."""

        def __init__(self, num_ranks, timeout_s):
            self.num_ranks = num_ranks

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

        def run(self, *args):
            return rank_pool.run(*args, world_size=self.num_ranks)

    monkeypatch.setattr(grpo.launch, "RankPool", PoolOfTheSession)
    out, *_ = stopped_run
    options = ("--steps", len(without_timings(out)) + 2, *settings(SMALL))
    assert call(train_grpo.main, monkeypatch, "--out", out, "--resume", *options) == 0
    assert call(train_grpo.main, monkeypatch, "--out", tmp_path, *options) == 0
    assert without_timings(out) == without_timings(tmp_path)


@pytest.fixture(scope="module")
def run_in_pool(rank_pool, tmp_path_factory):
    """Run the online job on ranks of the pool; gives its steps. Equal runs are run once."""
    done = {}

    def run_once(**overrides):
        key = json.dumps(overrides, sort_keys=True)
        if key not in done:
            options = SMALL | {"steps": 2, "loss_agg.terms.kl.coefficient": 0.1} | overrides
            config = load_config(GrpoConfig, CONFIGS / "grpo_count.yaml", options)
            out = tmp_path_factory.mktemp("pool")
            size = config.layout.world_size
            rank_pool.run(run_online, config, out, False, world_size=size)
            done[key] = without_timings(out)
        return done[key]

    return run_once


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"layout.pp": 1, "layout.dp": 1}, marks=pytest.mark.conformance),
        {"layout.pp": 2, "layout.vpp": 2, "layout.dp": 2},
        pytest.param(
            {"layout.pp": 2, "layout.tp": 2, "layout.dp": 1}, marks=pytest.mark.conformance
        ),
        {"layout.pp": 2, "layout.cp": 2, "layout.dp": 1},
    ],
    ids=lambda layout: " ".join(f"{k.removeprefix('layout.')}={v}" for k, v in layout.items()),
)
def test_layouts_learn_alike(layout, run_in_pool):
    """The same responses are sampled and the same steps are taken, up to rounding."""
    common = {"model.num_layers": 4}
    expected = run_in_pool(**common)
    for one, other in zip(run_in_pool(**common, **layout), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_run_goes_on_under_another_layout(run_in_pool, rank_pool, tmp_path):
    common = {"model.num_layers": 4}
    expected = run_in_pool(**common)
    layouts = [{}, {"layout.tp": 2, "layout.pp": 2, "layout.vpp": 2, "layout.dp": 1}]
    for steps, layout in enumerate(layouts, start=1):
        options = SMALL | {"loss_agg.terms.kl.coefficient": 0.1, "steps": steps}
        options |= common | layout
        config = load_config(GrpoConfig, CONFIGS / "grpo_count.yaml", options)
        rank_pool.run(run_online, config, tmp_path, steps > 1)
    found = without_timings(tmp_path)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-3, abs=1e-5)


def test_dr_grpo_runs_in_the_norm_mode(run_in_pool):
    steps = run_in_pool(
        **{
            "algorithm.normalize_by_std": False,
            "loss_agg.terms.policy.loss_agg_mode": "seq-mean-token-sum-norm",
            "loss_agg.terms.policy.loss_scale_factor": 10.0,
        }
    )
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert steps[0]["grad_norm"] > 0


def update_and_plain_autograd():
    """On a rank: what an update reports, and the same by plain autograd on the whole batch."""
    modes = {"policy": "seq-mean-token-mean", "kl": "token-mean", "entropy": "seq-mean-token-sum"}
    options = {f"loss_agg.terms.{name}.loss_agg_mode": mode for name, mode in modes.items()}
    options |= {"layout.pp": 1, "layout.dp": 1, "loss_agg.terms.kl.coefficient": 0.1}
    config = load_config(GrpoConfig, CONFIGS / "grpo_count.yaml", SMALL | options)
    trainer = Trainer(config, vocab_size=16, max_sequence_length=13)
    draw = torch.Generator().manual_seed(1)
    mask = torch.arange(12) < torch.randint(0, 13, (16, 1), generator=draw)
    mask[0], mask[1] = True, False
    batch = Batch(
        tokens=torch.randint(0, 16, (16, 13), generator=draw),
        loss_mask=mask,
        rewards=torch.zeros(16),
        advantages=torch.randn(16, generator=draw),
        old_log_probs=-2.8 + 0.3 * torch.randn(16, 12, generator=draw),
        ref_log_probs=-2.8 + 0.3 * torch.randn(16, 12, generator=draw),
    )
    model = trainer.chunks[0].module
    logits = model(batch.tokens[:, :-1], torch.arange(12).expand(16, -1), None).double()
    log_p = logits.log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    log_probs = log_p.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    ratio, advantages = (log_probs - batch.old_log_probs).exp(), batch.advantages[:, None]
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    x = batch.ref_log_probs - log_probs
    lengths, num_valid = mask.sum(dim=1), (mask.sum(dim=1) > 0).sum()
    policy = ((losses * mask).sum(dim=1) / lengths.clamp(min=1)).sum() / num_valid
    kl = ((x.exp() - x - 1) * mask).sum() / mask.sum()
    entropy = (entropy * mask).sum() / num_valid
    loss = policy + 0.1 * kl - 0.001 * entropy  # half way of the entropy's schedule
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    norm = sum(g.double().square().sum() for g in gradient).sqrt()
    expected = {"loss": loss, "policy": policy, "kl": kl, "entropy": entropy, "grad_norm": norm}
    return trainer.update(batch, step=30), {k: v.item() for k, v in expected.items()}


def test_an_update_is_that_of_the_plain_objective(rank_pool):
    [(found, expected)] = rank_pool.run(update_and_plain_autograd, world_size=1)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert 0 < found["clip_fraction"] < 1


def test_the_loss_is_the_sum_of_its_terms(run_in_pool):
    for step in run_in_pool(**{"model.num_layers": 4}):
        entropy_coefficient = -0.002 * (1 - step["step"] / 60)
        expected = step["policy"] + 0.1 * step["kl"] + entropy_coefficient * step["entropy"]
        assert step["loss"] == pytest.approx(expected, rel=1e-5)
        assert step["kl"] > 0 and step["entropy"] > 1


def test_a_comparison_stops_and_goes_on(rank_pool, tmp_path):
    options = SMALL | {"steps": 1, "layout.pp": 1, "layout.dp": 1}
    config = load_config(GrpoConfig, CONFIGS / "grpo_count.yaml", options)
    runs = runs_of(config, 2)
    assert len({run.folder_name for run in runs}) == len(runs) == 8
    open_comparison_folder(config, tmp_path, resume=False, num_seeds=1)
    rank_pool.run(run_comparison, config, tmp_path, False, world_size=1)
    table = (tmp_path / "comparison.md").read_text()
    assert [line.split("`")[1] for line in table.splitlines()[2:]] == list(MODES)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    first = without_timings(tmp_path / "token-mean-seed1")
    for refused, message in (
        (partial(open_run_folder, config, tmp_path, resume=False), "holds a comparison"),
        (partial(open_comparison_folder, config, tmp_path, resume=False), "holds a comparison"),
        (
            partial(open_comparison_folder, replace(config, seed=9), tmp_path, resume=True),
            "other options",
        ),
        (
            partial(open_comparison_folder, config, tmp_path / "token-mean-seed1", resume=True),
            "there is no comparison|holds a run without --compare",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    longer = replace(config, steps=3)
    open_comparison_folder(longer, tmp_path, resume=True)
    assert num_seeds_of(tmp_path) == 1
    (tmp_path / "STOP").touch()
    [is_stopped] = rank_pool.run(run_comparison, longer, tmp_path, True, world_size=1)
    assert is_stopped
    with pytest.raises(ValueError, match="has runs of 2 steps: give --steps 2 or more"):
        open_comparison_folder(config, tmp_path, resume=True)
    again = without_timings(tmp_path / "token-mean-seed1")
    assert again[0] == first[0] and len(again) == 2
    assert len(without_timings(tmp_path / "seq-mean-token-sum-seed1")) == 1


def train_on_nothing():
    """On a rank: a batch in which no token counts. Gives metrics and whether a weight changed."""
    config = load_config(
        GrpoConfig, CONFIGS / "grpo_count.yaml", SMALL | {"layout.pp": 1, "layout.dp": 1}
    )
    trainer = Trainer(config, vocab_size=16, max_sequence_length=13)
    zeros = torch.zeros(16, 12)
    batch = Batch(
        tokens=torch.zeros(16, 13, dtype=torch.long),
        loss_mask=zeros.bool(),
        rewards=zeros[:, 0],
        advantages=zeros[:, 0],
        old_log_probs=zeros,
        ref_log_probs=zeros,
    )
    before = [p.clone() for p in trainer.chunks[0].parameters()]
    metrics = train_on_batch(batch, trainer, config, step=1)
    after = trainer.chunks[0].parameters()
    return metrics, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_batch_without_tokens_leaves_the_model_alone(rank_pool):
    [(metrics, has_changed)] = rank_pool.run(train_on_nothing, world_size=1)
    assert not has_changed
    assert metrics["num_tokens"] == metrics["loss"] == metrics["grad_norm"] == 0
    assert math.isnan(metrics["clip_fraction"])


def write_rollouts(path: Path) -> None:
    lines = []
    for prompt in range(4):
        for answer in range(3 + prompt):
            record = {"prompt_id": f"p{prompt}", "prompt": f"{prompt}+1?", "policy": "x"}
            record |= {
                "response": str(answer) * (1 + answer),
                "reward": float(answer == prompt + 1),
            }
            lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_offline_trains_on_a_file(rank_pool, tmp_path):
    data, out = tmp_path / "rollouts.jsonl", tmp_path / "run"
    write_rollouts(data)
    options = {
        "data.path": str(data),
        "data.sequences_per_step": 8,
        "data.sequence_length": 8,
        "data.max_prompt_length": 4,
        "micro_batch_size": 2,
        "steps": 3,
    }
    config = load_config(OfflineConfig, CONFIGS / "grpo_offline.yaml", options)
    assert describe_data(config).startswith(
        "18 responses to 4 prompts, mean reward 0.222; 10 responses (55.6%) are cut to fit rows"
    )
    rank_pool.run(run_offline, config, out, False)
    steps = without_timings(out)
    assert [step["step"] for step in steps] == [1, 2, 3]
    # In the first step the model is the policy of the old log-probabilities; then it moves.
    assert steps[0]["kl_to_old"] == pytest.approx(0, abs=1e-9)
    assert steps[2]["kl_to_old"] > 1e-6
    assert (out / "training.png").exists()


def test_offline_names_a_bad_line_before_it_starts(tmp_path, monkeypatch, capsys):
    data = tmp_path / "rollouts.jsonl"
    write_rollouts(data)
    with data.open("a") as stream:
        stream.write('{"prompt_id": 9, "prompt": "?", "response": "!"}\n')
    code = call(train_offline.main, monkeypatch, data, "--out", tmp_path / "run")
    output, errors = capsys.readouterr()
    assert (code, output) == (EXIT_BAD_INPUT, "")
    assert errors.startswith(f"error: {data}:19: has no 'reward'")
    assert not (tmp_path / "run").exists()


def test_bad_options_end_before_ranks_start(tmp_path, monkeypatch, capsys):
    options = ("--loss-agg-mode", "seq-mean-token-sum-norm", "--out", tmp_path / "run")
    code = call(train_grpo.main, monkeypatch, *options)
    output, errors = capsys.readouterr()
    assert (code, output) == (EXIT_BAD_INPUT, "")
    assert "needs loss_scale_factor" in errors and errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_torchrun_with_another_number_of_ranks_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert call(train_grpo.main, monkeypatch, "--out", tmp_path / "run") == EXIT_BAD_INPUT
    assert "tp x pp x dp x cp = 4 ranks, but torchrun started 3" in capsys.readouterr().err


def test_a_run_is_not_overwritten_nor_mixed_with_another(
    stopped_run, tmp_path, monkeypatch, capsys
):
    out, *_ = stopped_run
    small = settings(SMALL)
    for arguments, message in (
        (("--out", out, *small), "already holds a run. Add --resume"),
        (("--out", out, "--resume", *small, "--seed", 5), "other options (seed: 1 -> 5)"),
        (("--out", out, "--resume", *small, "--steps", 1), "has all its steps"),
        (("--out", tmp_path, "--resume"), "there is no checkpoint in"),
    ):
        assert call(train_grpo.main, monkeypatch, *arguments) == EXIT_BAD_INPUT
        assert message in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_job_with_its_traceback(tmp_path, monkeypatch, capsys):
    class FailingPool(RankPool):
        def run(self, *args, **kwargs):
            raise RankFailure("rank 1 of 4 failed in run_online: ValueError: no\n--- rank 1 ---")

        def start(self):
            pass

    monkeypatch.setattr(grpo.launch, "RankPool", FailingPool)
    assert call(train_grpo.main, monkeypatch, "--out", tmp_path / "run") == EXIT_FAILED
    assert capsys.readouterr().err.startswith("error: rank 1 of 4 failed in run_online")
