"""Training on a file of rollouts, and what is said of a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import train_offline
from grpo.cli import CONFIGS, EXIT_BAD_INPUT
from grpo.config import OfflineConfig
from grpo.config_file import load_config
from grpo.jobs import describe_data, run_offline
from grpo_runs import call, without_timings


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
