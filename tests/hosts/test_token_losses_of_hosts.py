"""Token losses beside verl's, TRL's and torchtitan's own functions, in float64 where they let us.

Skipped where a host is not installed; importing verl and TRL takes half a minute. Values and
gradients agree to 1e-6 where the definitions do; where they differ, the difference that the
docstrings name is what is found.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lossagg import agg_loss, token_losses

pytestmark = pytest.mark.conformance

TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}


def _skip_without(package, install):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {install}")


def data(scale=0.5, sequence_advantages=False):
    """(x, old, A, mask) [6, 10], no row without valid tokens: hosts differ in how they count it."""
    generator = torch.Generator().manual_seed(2)
    x = -torch.rand(6, 10, generator=generator, dtype=torch.float64) * 4
    old = x + torch.randn(6, 10, generator=generator, dtype=torch.float64) * scale
    advantages = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    if sequence_advantages:
        advantages = advantages[:, :1].expand(6, 10).contiguous()
    mask = (torch.rand(6, 10, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    return x, old, advantages, mask


def value_and_gradient(scalar, x):
    x = x.clone().requires_grad_()
    value = scalar(x)
    [gradient] = torch.autograd.grad(value, [x])
    return value.detach(), gradient


def assert_same(ours, theirs, x):
    """Two scalar functions of x: values and gradients."""
    torch.testing.assert_close(
        value_and_gradient(ours, x), value_and_gradient(theirs, x), **TOLERANCE
    )


# --- verl ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core_algos():
    """verl/trainer/ppo/core_algos.py."""
    _skip_without("verl", "verl==0.9.1")
    return importlib.import_module("verl.trainer.ppo.core_algos")


def verl_config(clip_low, clip_high, **options):
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        **options,
    )


VERL_POLICIES = {
    "vanilla": (
        lambda *a: token_losses.ppo_clip(*a, clip_low=0.2, clip_high=0.28, dual_clip=1.6),
        (0.2, 0.28, {"clip_ratio_c": 1.6}),
    ),
    "gspo": (
        lambda *a: token_losses.gspo(*a, clip_low=0.1, clip_high=0.15),
        (0.1, 0.15, {}),
    ),
    "cispo": (
        lambda *a: token_losses.cispo(*a, clip_low=0.3, clip_high=0.2),
        (0.3, 0.2, {}),
    ),
    "sapo": (
        lambda *a: token_losses.sapo(*a, tau_pos=1.2, tau_neg=1.7),
        (0.2, 0.2, {"tau_pos": 1.2, "tau_neg": 1.7}),
    ),
    "gpg": (
        lambda x, old, a, mask: token_losses.policy_gradient(x, a, mask),
        (0.2, 0.2, {}),
    ),
    "geo_mean": (
        lambda *a: token_losses.gmpo(*a, clip_low=0.3, clip_high=0.4),
        (0.3, 0.4, {}),
    ),
}


@pytest.mark.parametrize("sequence_advantages", [False, True])
@pytest.mark.parametrize("name", VERL_POLICIES)
def test_verl_policy_losses(core_algos, name, sequence_advantages):
    """The scalar and its gradient with respect to every log-prob, also with weights of rollouts."""
    ours, (clip_low, clip_high, options) = VERL_POLICIES[name]
    x, old, advantages, mask = data(sequence_advantages=sequence_advantages)
    weights = token_losses.truncated_importance_weights(old, old - 0.1 * advantages, mask)
    for rollout_weights in (None,) if name == "geo_mean" else (None, weights):
        assert_same(
            lambda x, w=rollout_weights: agg_loss(
                ours(x, old, advantages, mask) * (1 if w is None else w),
                mask,
                "seq-mean-token-mean",
            ),
            lambda x, w=rollout_weights: core_algos.get_policy_loss_fn(name)(
                old_log_prob=old,
                log_prob=x,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode="seq-mean-token-mean",
                config=verl_config(clip_low, clip_high, **options),
                rollout_is_weights=w,
            )[0],
            x,
        )


def test_verl_clamps_log_ratios(core_algos):
    """Documented: a log ratio of 25 where A < 0 counts as 20, and has no gradient."""
    x, old = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), -25.0, dtype=torch.float64)
    config = verl_config(0.2, 0.2, clip_ratio_c=1e30)
    arguments = {"advantages": -torch.ones(1, 1), "response_mask": torch.ones(1, 1)}
    value, gradient = value_and_gradient(
        lambda x: core_algos.compute_policy_loss_vanilla(old, x, config=config, **arguments)[0], x
    )
    ours, our_gradient = value_and_gradient(
        lambda x: token_losses.ppo_clip(x, old, -torch.ones(1, 1), torch.ones(1, 1)).sum(), x
    )
    assert value.log().item() == pytest.approx(20) and gradient.item() == 0
    assert ours.log().item() == pytest.approx(25) and our_gradient.item() == ours.item()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_verl_kl_penalty(core_algos, estimator):
    x, ref, weights, mask = data()

    def weighted(kl):
        return (kl * weights * mask).sum()

    assert_same(
        lambda x: weighted(token_losses.kl_penalty(x, ref, mask, estimator=estimator)),
        lambda x: weighted(core_algos.kl_penalty(x, ref, estimator)),
        x,
    )


def test_verl_value_loss(core_algos):
    values, old, returns, mask = data()
    assert_same(
        lambda v: agg_loss(
            token_losses.value_loss(v, old, returns, mask, clip_value=0.3), mask, "token-mean"
        ),
        lambda v: core_algos.compute_value_loss(v, returns, old, mask, cliprange_value=0.3)[0],
        values,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_importance_weights(core_algos, level):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    old, rollout, _, mask = data(scale=0.3)
    theirs, _ = compute_rollout_correction_weights(
        old - rollout, mask, rollout_is=level, rollout_is_threshold=1.4
    )
    ours = token_losses.truncated_importance_weights(old, rollout, mask, level=level, cap=1.4)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


# --- TRL -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl_loss():
    """GRPOTrainer._compute_loss, and GMPOTrainer's, of given log-probs: no model, no trainer."""
    _skip_without("trl", "trl==1.16.0")
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    def compute(x, old, advantages, mask, *, ref=None, beta=0.0, level="token", **options):
        args = SimpleNamespace(
            delta=options.get("delta"),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.2,
            sapo_temperature_neg=1.7,
            steps_per_generation=1,
        )
        loss_type = options["loss_type"]
        trainer = SimpleNamespace(
            args=args,
            loss_type="grpo" if loss_type == "gmpo" else loss_type,
            importance_sampling_level=level,
            epsilon_low=options.get("low", 0.2),
            epsilon_high=options.get("high", 0.28),
            beta=beta,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            accelerator=SimpleNamespace(
                num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t
            ),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (x, torch.zeros_like(x), None),
        )
        inputs = {
            "prompt_ids": mask[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": advantages[:, 0],
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "num_items_in_batch": mask.sum(),
        }
        owner = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
        return owner._compute_loss(trainer, None, inputs)

    return compute


TRL_LOSSES = {
    "grpo": lambda *a: token_losses.ppo_clip(*a, clip_low=0.2, clip_high=0.28),
    "grpo-delta": lambda *a: token_losses.ppo_clip(*a, clip_low=0.2, clip_high=0.28, dual_clip=1.6),
    "cispo": lambda *a: token_losses.cispo(*a, clip_high=0.28),
    "sapo": lambda *a: token_losses.sapo(*a, tau_pos=1.2, tau_neg=1.7),
    "grpo-sequence": lambda *a: token_losses.gspo(*a, clip_low=0.1, clip_high=0.15),
    "gmpo": lambda *a: token_losses.gmpo(*a, clip_low=0.3, clip_high=0.4),
}


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_trl_losses(trl_loss, name):
    """Advantages per sequence, as TRL has them. CISPO's bound there is that of the ratio."""
    x, old, advantages, mask = data(sequence_advantages=True)
    options = {"loss_type": name.split("-")[0]}
    if name == "grpo-delta":
        options["delta"] = 1.6
    elif name == "grpo-sequence":
        options |= {"level": "sequence", "low": 0.1, "high": 0.15}
    elif name == "cispo":
        options["high"] = 1.28
    elif name == "gmpo":
        options |= {"low": 0.3, "high": 0.4}
    mode = "token-mean" if name == "cispo" else "seq-mean-token-mean"
    assert_same(
        lambda x: agg_loss(TRL_LOSSES[name](x, old, advantages, mask), mask, mode),
        lambda x: trl_loss(x, old, advantages, mask, **options),
        x,
    )


def test_trl_kl_term(trl_loss):
    x, ref, _, mask = data()
    assert_same(
        lambda x: (
            0.3 * agg_loss(token_losses.kl_penalty(x, ref, mask), mask, "seq-mean-token-mean")
        ),
        lambda x: trl_loss(x, x.detach(), 0 * x, mask, ref=ref, beta=0.3, loss_type="grpo"),
        x,
    )


# --- torchtitan ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dapo_loss():
    """DAPOLoss, from its file: the package around it imports vLLM."""
    _skip_without("torchtitan", "torchtitan==0.3.0")
    [root] = importlib.util.find_spec("torchtitan").submodule_search_locations
    path = Path(root) / "experiments" / "rl" / "losses" / "dapo.py"
    spec = importlib.util.spec_from_file_location("torchtitan_dapo", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.DAPOLoss


def test_torchtitan_dapo_loss(dapo_loss):
    """From logits, in float32 as torchtitan computes: 1e-5; NaN at a masked position is dropped."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, 11, generator=generator)
    labels = torch.randint(11, (3, 8), generator=generator)
    own = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    old = own + 0.4 * torch.randn(3, 8, generator=generator)
    advantages = torch.randn(3, 8, generator=generator)
    mask = torch.rand(3, 8, generator=generator) < 0.7
    old = old.masked_fill(~mask, torch.nan)
    theirs = dapo_loss(dapo_loss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28))

    def ours(logits):
        log_probs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        losses = token_losses.ppo_clip(
            log_probs, old, advantages, mask, clip_low=0.2, clip_high=0.28
        )
        return losses.sum() / mask.sum()

    torch.testing.assert_close(
        value_and_gradient(ours, logits),
        value_and_gradient(
            lambda logits: theirs(
                logits,
                labels,
                float(mask.sum()),
                generator_logprobs=old,
                advantages=advantages,
                loss_mask=mask,
            )[0],
            logits,
        ),
        rtol=1e-5,
        atol=1e-7,
    )
