"""Options of the example: text for numbers and flags, presets beside terms, modes of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from grpo.cli import CONFIGS, EXIT_BAD_INPUT, config_file_of, make_parser, overrides_of
from grpo.config import GrpoConfig
from grpo.config_file import load_config
from grpo.run_folder import open_run_folder

from megatron_lossagg.modes import ModeSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILE = CONFIGS / "grpo_count.yaml"
POLICY = "loss_agg.terms.policy"


def config_of(*settings: str) -> GrpoConfig:
    """What the command makes of --set."""
    flags = [text for setting in settings for text in ("--set", setting)]
    arguments = make_parser("", FILE.name).parse_args(flags)
    return load_config(GrpoConfig, config_file_of(arguments), overrides_of(arguments))


@pytest.mark.parametrize("text", ["2e3", "'2000'", "2000.0", "2_000"])
def test_numbers_mean_the_same_everywhere(text):
    config = config_of(
        f"{POLICY}.loss_scale_factor={text}",
        f"seed={text}",
        f"optimizer.clip_grad={text}",
        f"loss_agg.terms.entropy.coefficient.iterations={text}",
    )
    policy, _, entropy = config.loss_agg.terms
    assert policy.loss_scale_factor == config.seed == config.optimizer.clip_grad == 2000
    assert entropy.coefficient.iterations == 2000 and type(config.seed) is int


@pytest.mark.parametrize("text", ["false", "off", "no", "'false'", "'Off'"])
def test_flags_that_say_no(text):
    config = config_of(
        f"algorithm.normalize_by_std={text}",
        f"loss_agg.compile={text}",
        f"loss_agg.report_counts={text}",
    )
    assert config.algorithm.normalize_by_std is False
    assert config.loss_agg.compile is False and config.loss_agg.report_counts is False


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.normalize_by_std=1", "normalize_by_std must be true or false, got 1"),
        ("loss_agg.compile=maybe", "loss_agg.compile must be true or false, got 'maybe'"),
        ("optimizer.lr=.nan", "optimizer.lr must be a number, got nan"),
        ("optimizer.lr=.inf", "optimizer.lr=inf must be at least 0 and below inf"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf must be at least 0 and below"),
        ("optimizer.beta2=1", "optimizer.beta2=1.0 must be at least 0 and below 1."),
        ("algorithm.clip_high=-1e0", "algorithm.clip_high=-1.0 must be greater than 0"),
        ("steps=few", "steps must be a whole number, got 'few'"),
        ("name=2", "name must be text, got 2 of type int; put it in quotes"),
    ],
)
def test_values_that_are_of_no_use(setting, message):
    with pytest.raises(ValueError, match=message):
        config_of(setting)


@pytest.mark.parametrize("name", ["''", "..", "../x", "/x"])
def test_names_that_name_no_folder(name):
    with pytest.raises(ValueError, match="cannot name a folder in .*Change it, or pass --out"):
        open_run_folder(config_of(f"name={name}"), None, resume=False)


def test_an_infinite_clip_is_none():
    assert config_of("algorithm.clip_high=.inf").algorithm.clip_high == float("inf")


def test_a_preset_beside_terms(tmp_path):
    values = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    values["loss_agg"] = {
        "preset": "dr_grpo",
        "loss_scale_factor": "1e1",
        "terms": [{"name": "policy"}, {"name": "kl", "loss_agg_mode": "token-mean"}],
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    config = load_config(GrpoConfig, path, {"loss_agg.terms.kl.coefficient": "1e-2"})
    policy, kl = (term.with_loss_fn(print) for term in config.loss_agg.terms)
    assert policy.weighting.spec == ModeSpec(
        "seq-mean-token-sum-norm",
        loss_scale_factor=10,
        norm_semantics="seq-mean",
        sequence_count="nominal",
    )
    assert kl.weighting.spec == ModeSpec("token-mean", sequence_count="nominal")
    assert kl.coefficient == 0.01
    changed = load_config(GrpoConfig, path, {f"{POLICY}.loss_agg_mode": "token-sum"})
    assert changed.policy_mode == "token-sum"


# --- modes of one's own --------------------------------------------------------------------------


def run(folder: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MEGATRON_LOSSAGG_IMPORT")
    }
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_job_trains_with_a_mode_from_this_folder(tmp_path):
    """--import reaches the ranks that the job starts."""
    (tmp_path / "my_modes.py").write_text(
        "from megatron_lossagg import register_mode\n"
        'register_mode("sqrt-length", lambda n_s, c: 1 / (c.num_seqs * n_s.sqrt()))\n'
    )
    small = ("rollout.prompts_per_step=2", "rollout.group_size=2", "model.hidden_size=16")
    settings = [text for setting in small for text in ("--set", setting)]
    layout = ("--pp", 1, "--dp", 2, "--micro-batch-size", 2, "--steps", 1)
    done = run(
        tmp_path,
        "train_grpo.py",
        *("--import", "my_modes", "--loss-agg-mode", "sqrt-length", "--out", "out"),
        *layout,
        *settings,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terms policy sqrt-length" in done.stdout
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("script", ["train_grpo.py", "train_offline.py"])
def test_a_module_that_is_not_there(script, tmp_path):
    data = ("data.jsonl",) if script == "train_offline.py" else ()
    done = run(tmp_path, script, "--import", "my_modes", *data)
    assert done.returncode == EXIT_BAD_INPUT
    [line] = done.stderr.splitlines()
    assert line.startswith("error: cannot import 'my_modes', named by --import or MEGATRON_LOSSAGG")
    assert "No module named 'my_modes'" in line and f"current folder {tmp_path}." in line
    assert "--import MODULES" in run(tmp_path, script, "--help").stdout


def test_an_unknown_mode_names_the_option():
    with pytest.raises(ValueError, match="Unknown loss_agg_mode 'sqrt-length'.* --import MODULE"):
        config_of(f"{POLICY}.loss_agg_mode=sqrt-length")


def test_a_run_of_an_earlier_version_goes_on(tmp_path, monkeypatch):
    """Its file lacks options that came later: they have their defaults. Others stay as they are."""
    config = load_config(GrpoConfig, CONFIGS / "grpo_count.yaml")
    folder = open_run_folder(config, tmp_path / "run", resume=False)
    monkeypatch.setattr("grpo.run_folder.latest_step", lambda checkpoints: 1)
    saved = folder / "config.yaml"
    lines = saved.read_text().splitlines(keepends=True)
    saved.write_text("".join(line for line in lines if "checks:" not in line))
    assert len(saved.read_text().splitlines()) == len(lines) - 1
    assert open_run_folder(config, folder, resume=True) == folder
    saved.write_text(saved.read_text().replace("seed: 1", "seed: 2"))
    with pytest.raises(ValueError, match=r"with other options \(seed: 2 -> 1\)"):
        open_run_folder(config, folder, resume=True)
