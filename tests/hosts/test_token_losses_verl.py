"""Token losses beside verl's own functions: 1e-6, and the differences that docstrings name.

Skipped where verl is not installed.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from host_losses import TOLERANCE, assert_same, data, skip_without, value_and_gradient

from megatron_lossagg import agg_loss, token_losses

pytestmark = pytest.mark.conformance  # importing it takes long


@pytest.fixture(scope="module")
def core_algos():
    """verl/trainer/ppo/core_algos.py."""
    skip_without("verl", "verl==0.9.1")
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
