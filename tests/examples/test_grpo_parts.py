"""The parts of the examples that need no ranks: verifier, advantages, losses, files, options."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from grpo.advantages import group_advantages
from grpo.cli import CONFIGS, config_file_of, make_parser, overrides_of
from grpo.config import DataConfig, GrpoConfig, OfflineConfig
from grpo.config_file import load_config
from grpo.jobs import summarize_rewards
from grpo.metrics import MetricsWriter, read_metrics
from grpo.offline import EOS, SEPARATOR, Record, encode, read_records
from grpo.progress import Column, RunDisplay
from grpo.task import EOS as COUNT_EOS
from grpo.task import CountTask
from grpo.terms import POLICY_METRICS, PolicyOutput, entropy_term, kl_term, ppo_clip_term

from megatron_lossagg import LossAggConfig

POLICY = "loss_agg.terms.policy"

# --- task ----------------------------------------------------------------------------------------


def test_prompts_are_drawn_from_the_whole_task_and_reproducibly():
    task = CountTask(max_count=3, max_response_length=5)
    prompts = task.prompts(400, torch.Generator().manual_seed(0))
    assert set(prompts[:, 0].tolist()) == {1, 2, 3}
    assert set(prompts[:, 1].tolist()) == set(range(10))
    assert torch.equal(prompts, task.prompts(400, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ([7, 7, 7, COUNT_EOS], 1.0),
        ([7, 7, COUNT_EOS], 2 / 4),  # EOS came too early
        ([7, 7, 7, 7, COUNT_EOS], 3 / 5),  # too late
        ([7, 7, 7], 3 / 4),  # cut off
        ([COUNT_EOS], 0.0),
        ([1, 2, 3, 4, 5, 6], 0.0),
        ([], 0.0),
    ],
)
def test_reward_counts_matching_positions(response, reward):
    prompt = torch.tensor([3, 7, 10])
    assert CountTask().reward(prompt, response) == pytest.approx(reward)


def test_rewards_of_a_batch_ignore_what_follows_a_response():
    prompts = torch.tensor([[1, 4, 10], [2, 5, 10]])
    responses = torch.tensor([[4, COUNT_EOS, 4, 4], [5, 5, COUNT_EOS, 0]])
    rewards = CountTask().rewards(prompts, responses, torch.tensor([2, 3]))
    torch.testing.assert_close(rewards, torch.ones(2))


def test_a_task_whose_answers_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="max_response_length=6 is too short.*7 tokens"):
        CountTask(max_count=6, max_response_length=6)


# --- advantages and losses -----------------------------------------------------------------------


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_advantages_compare_within_groups_of_any_size(normalize_by_std):
    rewards = torch.tensor([1.0, 5.0, 0.0, 3.0, 2.0, 7.0])
    groups = torch.tensor([0, 1, 0, 1, 0, 2])
    found = group_advantages(rewards, groups, normalize_by_std=normalize_by_std)
    expected = torch.zeros(6)
    for group in (0, 1):
        rows = groups == group
        centered = rewards[rows] - rewards[rows].mean()
        expected[rows] = centered / rewards[rows].std() if normalize_by_std else centered
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_group_of_equal_rewards_has_no_advantage():
    rewards, group = torch.full((8,), 0.1), torch.zeros(8, dtype=torch.long)
    assert group_advantages(rewards, group, normalize_by_std=True).abs().max() < 1e-6


def evaluate_terms(log_probs, microbatch):
    """Losses of every term and metric of the policy term, with the entropy set to 1."""
    output = PolicyOutput(log_probs, torch.ones_like(log_probs))
    policy, metrics = ppo_clip_term(0.2, 0.3)(output, microbatch)
    return {
        "policy": policy,
        "kl": kl_term(output, microbatch),
        "entropy": entropy_term(output, microbatch),
        **metrics,
    }


def test_terms_are_the_plain_formulas():
    generator = torch.Generator().manual_seed(0)
    log_probs, old, ref, advantages = torch.randn(4, 3, 50, generator=generator)
    mask = torch.rand(3, 50, generator=generator) < 0.7
    microbatch = {
        "old_log_probs": old,
        "ref_log_probs": ref,
        "advantages": advantages,
        "loss_mask": mask.float() / 7,  # weights ride in it
    }
    found = evaluate_terms(log_probs, microbatch)
    assert set(found) == {"policy", "kl", "entropy", *POLICY_METRICS}
    for position in mask.nonzero().tolist():
        lp, o, r, a = (x[tuple(position)].item() for x in (log_probs, old, ref, advantages))
        ratio = math.exp(lp - o)
        clipped = min(max(ratio, 0.8), 1.3)
        expected = {
            "policy": -min(ratio * a, clipped * a),
            "kl": math.exp(r - lp) - (r - lp) - 1,
            "entropy": 1.0,
            "clip_fraction": float(clipped * a < ratio * a),
            "kl_to_old": ratio - math.log(ratio) - 1,
            "advantage_gain": a * (lp - o),
        }
        at = {name: value[tuple(position)].item() for name, value in found.items()}
        assert at == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_reaches_neither_values_nor_gradients(bad):
    mask = torch.tensor([[1.0, 0.0, 1.0]])

    def run(value: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        log_probs = torch.tensor([[-1.0, value, -2.0]], requires_grad=True)
        other = torch.tensor([[-1.1, value, -1.9]])
        fields = dict.fromkeys(("old_log_probs", "ref_log_probs", "advantages"), other)
        found = evaluate_terms(log_probs, fields | {"loss_mask": mask})
        del found["entropy"]
        (found["policy"] + found["kl"]).sum().backward()
        assert log_probs.grad is not None
        return found, log_probs.grad

    found, gradient = run(bad)
    expected, expected_gradient = run(0.0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(gradient, expected_gradient)
    assert gradient[0, 1] == 0


def test_nan_that_counts_shows():
    ones = torch.ones(1, 2)
    fields = dict.fromkeys(("old_log_probs", "ref_log_probs", "advantages", "loss_mask"), ones)
    found = evaluate_terms(torch.tensor([[math.nan, 0.0]]), fields)
    for name in ("policy", "kl", "kl_to_old", "advantage_gain"):
        assert found[name].isnan().tolist() == [[True, False]]


# --- recorded responses --------------------------------------------------------------------------

GOOD = {"prompt_id": 1, "prompt": "2+2?", "response": "4", "reward": 1.0}


def test_records_are_read_and_other_keys_are_left_alone(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(GOOD | {"policy": "a"}), "", json.dumps(GOOD | {"reward": 0})]
    path.write_text("\n".join(lines))
    assert [record.reward for record in read_records(path)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got \\[1\\]"),
        (json.dumps({"prompt": "x"}), "has no 'prompt_id'; its keys are prompt"),
        (json.dumps(GOOD | {"reward": "high"}), "'reward' must be a number, got \"high\""),
        (json.dumps(GOOD | {"reward": math.nan}), "'reward' must be a finite number, got nan"),
        (json.dumps(GOOD | {"response": None}), "'response' must be text, got null"),
        (json.dumps(GOOD | {"prompt": "3+3?"}), "prompt_id 1 has another prompt than on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ValueError, match=f"data.jsonl:2: {message}"):
        read_records(path)


def test_text_that_is_not_utf8_and_files_without_lines_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="data.jsonl:1: not UTF-8"):
        read_records(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no responses"):
        read_records(path)
    with pytest.raises(ValueError, match="Cannot read .*No such file"):
        read_records(tmp_path / "missing.jsonl")


def test_encoding_cuts_prompts_at_the_front_and_responses_at_the_end():
    config = DataConfig(path="x", sequence_length=8, max_prompt_length=3)
    short = encode(Record("1", "ab", "cd", 0.0), config)
    assert short.tokens.tolist() == [*b"ab", SEPARATOR, *b"cd", EOS]
    assert (short.prompt_length, short.prompt_is_cut, short.response_is_cut) == (3, False, False)
    long = encode(Record("1", "abcde", "fghijk", 0.0), config)
    assert long.tokens.tolist() == [*b"cde", SEPARATOR, *b"fghi"]
    assert (long.prompt_is_cut, long.response_is_cut) == (True, True)


# --- options -------------------------------------------------------------------------------------


def load(**overrides) -> GrpoConfig:
    return load_config(GrpoConfig, CONFIGS / "grpo_count.yaml", overrides)


def test_a_preset_in_the_file(tmp_path):
    """`preset` names the aggregation, other options of `loss_agg` complete it."""
    text = (CONFIGS / "grpo_count.yaml").read_text(encoding="utf-8")
    text = text[: text.index("loss_agg:")] + "loss_agg: {preset: dr_grpo, loss_scale_factor: 10}\n"
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    [term] = load_config(GrpoConfig, path).loss_agg.terms
    assert term.name == "policy"
    spec = LossAggConfig.preset("dr_grpo", loss_scale_factor=10).main_spec
    assert term.with_loss_fn(print).weighting.spec == spec
    with pytest.raises(ValueError, match="mine.yaml has no terms"):
        load_config(GrpoConfig, path, {"loss_agg.terms.kl.coefficient": 0.1})
    path.write_text(text.replace("preset: dr_grpo, ", "loss_agg_mode: token-sum, "))
    changed = {f"{POLICY}.loss_agg_mode": "token-mean"}
    assert load_config(GrpoConfig, path, changed).policy_mode == "token-mean"
    path.write_text(text, encoding="utf-8")
    path.write_text(text.replace("dr_grpo", "bnpo"), encoding="utf-8")
    with pytest.raises(ValueError, match="no objective of the global batch"):
        load_config(GrpoConfig, path)


def test_the_default_files_are_complete():
    """A reader of a YAML file sees every option that there is, with the value that is used."""
    import yaml

    for config_class, name in ((GrpoConfig, "grpo_count"), (OfflineConfig, "grpo_offline")):
        path = CONFIGS / f"{name}.yaml"
        overrides = {"data.path": "x"} if config_class is OfflineConfig else {}
        loaded = load_config(config_class, path, overrides).to_dict()
        written = yaml.safe_load(path.read_text())
        # Of the aggregator's options a run chooses what the objective is, not how it is computed.
        loaded["loss_agg"] = {
            "terms": [
                {key: found[key] for key in term}
                for found, term in zip(
                    loaded["loss_agg"]["terms"], written["loss_agg"]["terms"], strict=True
                )
            ]
        }
        for dotted, value in overrides.items():
            written[dotted.split(".")[0]][dotted.split(".")[1]] = value
        assert loaded == written


def test_resuming_takes_the_options_of_the_run(tmp_path):
    """Without --config: those the run was started with; then the default file's; flags win."""
    parser = make_parser("", "grpo_count.yaml")
    saved = tmp_path / "config.yaml"
    saved.write_text((CONFIGS / "grpo_count.yaml").read_text().replace("seed: 1", "seed: 7"))
    resume = parser.parse_args(["--resume", "--out", str(tmp_path), "--steps", "9"])
    config = load_config(GrpoConfig, config_file_of(resume), overrides_of(resume))
    assert (config.seed, config.steps) == (7, 9)
    assert config_file_of(parser.parse_args(["--out", str(tmp_path)])).name == "grpo_count.yaml"
    other = parser.parse_args(["--resume", "--out", str(tmp_path), "--config", "mine.yaml"])
    assert config_file_of(other).name == "mine.yaml"


def test_flags_override_settings_override_the_file():
    arguments = make_parser("", "grpo_count.yaml").parse_args(
        [
            "--dp",
            "4",
            "--set",
            "layout.dp=1",
            "--set",
            "loss_agg.terms.kl.coefficient=1e-2",
            "--lr",
            "2e-3",
        ]
    )
    config = load_config(GrpoConfig, config_file_of(arguments), overrides_of(arguments))
    assert (config.layout.dp, config.layout.pp) == (4, 2)
    assert [t.coefficient for t in config.loss_agg.terms if t.name == "kl"] == [0.01]
    assert config.optimizer.lr == 0.002


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"steps": 0}, "steps=0 must be greater than 0"),
        ({"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ({"optimizer.lr": "fast"}, "optimizer.lr must be a number, got 'fast'"),
        ({"optimizer.lrr": 1.0}, "optimizer: unknown option\\(s\\) lrr; known ones: lr, "),
        ({"step": 3, "lyout.dp": 3}, "unknown option\\(s\\) lyout, step"),
        ({"layout": 3}, "layout: expected a mapping of options, got int"),
        ({"layout.dp": 3}, "512 sequences do not divide into microbatches of 128 on 3"),
        ({"micro_batch_size": 100}, "512 sequences do not divide into microbatches of 100"),
        ({"layout.dp": 0}, "layout.dp=0 must be greater than 0"),
        ({"layout.vpp": 2}, "num_layers=2 cannot be spread over PP x VPP = 4"),
        ({"layout.vpp": 2, "layout.pp": 1}, "vpp=2 needs pp > 1"),
        ({"layout.tp": 3}, "num_heads=4 must .* be a multiple of layout.tp=3"),
        ({f"{POLICY}.loss_agg_mode": "mean"}, "Unknown loss_agg_mode 'mean'; expected one of"),
        ({f"{POLICY}.loss_agg_mode": "seq-mean-token-sum-norm"}, "needs loss_scale_factor"),
        ({f"{POLICY}.metrics": {"kl": "sum"}}, "metrics and mask_key are this example's own"),
        ({f"{POLICY}.mode": "mean"}, "loss_agg.terms.policy: unknown option\\(s\\) mode"),
        (
            {"loss_agg.terms.kl2.coefficient": 1.0},
            "there is no kl2 .*, only policy, kl, entropy. Add",
        ),
        ({"loss_agg.terms.kl": 1.0}, "name the entry of terms and its option"),
        ({"loss_agg.terms": []}, "needs 'loss_agg_mode'.* or 'terms'"),
        (
            {"loss_agg.terms": [{"name": "p", "loss_agg_mode": "token-mean"}]},
            "needs one term named 'policy', and may have one kl and one entropy; it has p",
        ),
        ({"loss_agg.terms.kl.name": "entropy"}, "it has policy, entropy, entropy"),
        (
            {"loss_agg.terms.kl.coefficient": math.nan},
            "loss_agg.terms.kl.coefficient must be a number, got nan",
        ),
        (
            {"loss_agg.terms.kl.coefficient": {"start": "a", "end": 0, "iterations": 3}},
            "loss_agg.terms.kl.coefficient.start must be a number, got 'a'",
        ),
        ({f"{POLICY}.loss_agg_mode": "unit-mean-token-mean"}, "counts units, and this example"),
        ({"loss_agg.denominators": "deferred"}, "denominators='deferred' does not work in this"),
        ({"loss_agg.sequence_count": "nominal"}, "sequence_count cannot be given beside terms"),
        ({"loss_agg.weights_key": "w"}, "weights_key='w' does not work here"),
        ({"rollout.group_size": 1}, "group_size=1 gives every response the advantage 0"),
        ({"rollout.prompts_per_step": 1, "micro_batch_size": 4}, "no multiple of layout.dp=2"),
        ({"algorithm.clip_low": 1.0}, "clip_low=1.0 must be between 0 and 1"),
    ],
)
def test_bad_options_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load(**overrides)


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(ValueError, match="Cannot read the configuration .*config.yaml"):
        load_config(GrpoConfig, path)
    path.write_text("steps: 3\n")
    with pytest.raises(ValueError, match="missing option.* name, micro_batch_size, loss_agg"):
        load_config(GrpoConfig, path)
    path.write_text("- steps\n")
    with pytest.raises(ValueError, match="expected a mapping of options, got list"):
        load_config(GrpoConfig, path)


# --- metrics -------------------------------------------------------------------------------------


def test_resuming_drops_steps_after_the_checkpoint(tmp_path):
    writer = MetricsWriter(tmp_path, resume_after=0)
    for step in (1, 2, 3):
        writer.write({"step": step, "reward": 0.5})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "rew')  # the machine went down
    resumed = MetricsWriter(tmp_path, resume_after=2)
    resumed.write({"step": 3, "reward": 0.7})
    resumed.close()
    assert [(m["step"], m["reward"]) for m in read_metrics(path)] == [(1, 0.5), (2, 0.5), (3, 0.7)]


@pytest.mark.parametrize("is_live", [True, False])
def test_the_display_shows_every_metric(is_live, capsys):
    columns = [Column("reward", "reward (0 to 1)", ".3f"), Column("loss", "loss", ".4f")]
    before = [{"step": 1, "reward": 0.1, "loss": 0.0}]
    with RunDisplay(columns, 3, before, is_live=is_live) as display:
        display.step({"step": 2, "reward": 0.25, "loss": -0.5})
        display.step({"step": 3, "reward": 0.5, "loss": 0.125})
    output = capsys.readouterr().out
    assert "reward (0 to 1)" in output and "0.500" in output and "0.1250" in output
    assert ("\x1b" in output) == is_live
    if not is_live:
        assert [line.split()[0] for line in output.splitlines()] == ["step", "2", "3"]


def test_the_summary_says_whether_the_goal_was_reached():
    rising = [{"step": step, "reward": step / 20} for step in range(1, 21)]
    assert "Reward 0.050 at step 1 -> 0.775 (mean of the last 10" in summarize_rewards(rising)
    assert "Goal NOT reached: 0.9" in summarize_rewards(rising)
    there = [*rising, *({"step": step, "reward": 0.95} for step in range(21, 31))]
    assert "-> 0.950" in summarize_rewards(there)
    assert "Goal reached: 0.9 of the maximum, first at step 18" in summarize_rewards(there)


def test_the_launch_scripts_are_shell():
    folder = Path(__file__).resolve().parents[2] / "examples" / "launch"
    for name in ("torchrun.sh", "slurm.sh"):
        subprocess.run(["bash", "-n", folder / name], check=True)
