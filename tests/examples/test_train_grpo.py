"""The two commands, run: what they leave behind, resuming, stopping, failing.

The property that matters most: a run that was stopped and resumed has, bit for bit, the numbers of
one that was not. One run starts ranks of its own; the others use those of the session's pool, which
saves the seconds that starting takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpo.launch
import pytest
import train_grpo
from grpo.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from grpo.metrics import read_metrics
from grpo_runs import SMALL, call, settings, without_timings

from megatron_lossagg.testing import RankFailure, RankPool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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
