"""Training, on ranks of the session's pool: layouts learn alike, an update is the right one."""

from __future__ import annotations

import json
import math

import pytest
import torch
from grpo.batch import Batch
from grpo.cli import CONFIGS
from grpo.config import GrpoConfig
from grpo.config_file import load_config
from grpo.jobs import run_online
from grpo.loop import train_on_batch
from grpo.trainer import Trainer
from grpo_runs import SMALL, without_timings


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
