"""Comparing modes: a run per mode and seed, stopped and gone on with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from grpo.cli import CONFIGS
from grpo.comparison import MODES, run_comparison, runs_of
from grpo.config import GrpoConfig
from grpo.config_file import load_config
from grpo.run_folder import num_seeds_of, open_comparison_folder, open_run_folder
from grpo_runs import SMALL, without_timings


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
