"""What each token loss is for: its gradient at ratio 1, its bounds, its use as a loss_fn."""

from __future__ import annotations

import math

import pytest
import torch
from token_loss_cases import LOSSES, data, ppo, run

from megatron_lossagg import LossAggregator, ParallelGroups, token_losses


@pytest.mark.parametrize("name", ["ppo", "ppo-dual", "cispo", "sapo", "ppo-unclipped", "gspo"])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name):
    x, _, advantages, mask = data()
    _, gradient = run(LOSSES[name], x, x.clone(), advantages, mask)
    _, expected = run(LOSSES["policy-gradient"], x, x, advantages, mask)
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["ppo", "ppo-dual", "cispo", "sapo", "tis", "tis-sequence"])
def test_what_is_clipped_does_not_overflow(name):
    """A log ratio of +-1000 where A > 0 or A = 0: finite, and a gradient of 0 but for CISPO's."""
    x = torch.tensor([[0.0, 0, 0, 0]])
    old = torch.tensor([[-1000.0, 1000, -1000, 1000]])
    advantages = torch.tensor([[1.0, 1, 0, 0]])
    values, gradient = run(LOSSES[name], x, old, advantages, torch.ones(1, 4))
    assert values.isfinite().all() and gradient.isfinite().all()
    if name != "cispo":
        assert (gradient == 0).all()


def test_dual_clip_bounds_a_bad_token_and_stops_its_gradient():
    """A < 0 and a ratio of e^50: -A * c instead of 5e21."""
    old, advantages = torch.tensor([[-50.0]]), torch.tensor([[-2.0]])
    values, gradient = run(ppo(0.2, 0.2, 3.0).loss, torch.zeros(1, 1), old, advantages, old)
    assert values.item() == pytest.approx(6.0) and gradient.item() == 0
    values, gradient = run(ppo(0.2, 0.2).loss, torch.zeros(1, 1), old, advantages, old)
    assert values.item() == pytest.approx(2 * math.exp(50)) and gradient.item() > 0


def test_what_the_kl_estimators_are_good_for():
    """Exact expectations over a distribution p, and of the gradient that sampling would give."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_()
    log_ref = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.detach().exp()
    exact = (log_p.exp() * (log_p - log_ref)).sum()
    [exact_gradient] = torch.autograd.grad(exact, [logits], retain_graph=True)
    expectation, gradient = {}, {}
    for name in ("k1", "k2", "k3", "k1+", "k3+"):
        estimate = token_losses.kl_penalty(
            log_p[None], log_ref[None], torch.ones(1, 8), estimator=name
        )
        expectation[name] = (p * estimate[0]).sum()
        [gradient[name]] = torch.autograd.grad(expectation[name], [logits], retain_graph=True)
        if "3" in name:
            assert (estimate >= 0).all()
    for name in ("k1", "k3", "k1+", "k3+"):
        assert expectation[name].item() == pytest.approx(exact.item(), rel=1e-12)
    assert expectation["k2"].item() != pytest.approx(exact.item(), rel=1e-2)
    for name in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(gradient[name], exact_gradient, rtol=1e-12, atol=1e-15)
    assert gradient["k1"].abs().max() < 1e-15
    assert (gradient["k3"] - exact_gradient).abs().max() > 1e-2


def test_k3_of_a_small_step_has_digits():
    """float32, x = 0.001: the naive exp(x) - x - 1 is off by 5 %."""
    x = torch.full((1, 1), 1e-3)
    found = token_losses.kl_penalty(-x, torch.zeros(1, 1), torch.ones(1, 1))
    assert found.item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_usable_as_loss_fn():
    """Terms add up in a loss_fn; the gradient is weight times that of the token losses."""

    def loss_fn(output, microbatch):
        log_probs, mask = -output, microbatch["loss_mask"]
        policy = token_losses.ppo_clip(
            log_probs, microbatch["old_log_probs"], microbatch["advantages"], mask
        )
        weights = token_losses.truncated_importance_weights(
            microbatch["old_log_probs"], microbatch["rollout_log_probs"], mask
        )
        penalty = token_losses.kl_penalty(log_probs, microbatch["ref_log_probs"], mask)
        return weights * policy + 0.1 * penalty

    class Config:
        calculate_per_token_loss = False

    x, other, advantages, mask = data()
    aggregator = LossAggregator(
        loss_fn,
        loss_agg_mode="token-mean",
        model_config=Config(),
        groups=ParallelGroups.single_process(),
        weight_dtype=torch.float64,
    )
    microbatch = {
        "loss_mask": mask,
        "old_log_probs": other,
        "rollout_log_probs": other - 0.3,
        "ref_log_probs": other * 0.9,
        "advantages": advantages,
    }
    step = aggregator.begin_step([microbatch])
    nll = (-x).requires_grad_()
    loss, _ = step.loss_func(next(step.data_iterator(1)[0]), nll)
    loss.backward()
    expected_x = x.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i, j in mask.nonzero().tolist():
        rho = torch.exp(expected_x[i, j] - other[i, j])
        policy = torch.maximum(-advantages[i, j] * rho, -advantages[i, j] * rho.clamp(0.8, 1.2))
        gap = other[i, j] * 0.9 - expected_x[i, j]
        total = total + min(math.exp(0.3), 2.0) * policy + 0.1 * (gap.exp() - gap - 1)
    total = total / mask.sum()
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-13)
    torch.testing.assert_close(-nll.grad, expected_x.grad, rtol=1e-12, atol=1e-15)


def test_wrong_arguments_are_refused():
    """A message says what was passed and what to do."""
    x, old, advantages, mask = data()
    with pytest.raises(ValueError, match=r"advantages has shape \(5,\), but loss_mask \(5, 9\)"):
        token_losses.ppo_clip(x, old, advantages[:, 0], mask)
    with pytest.raises(TypeError, match="old_log_probs must be a tensor, got NoneType"):
        token_losses.ppo_clip(x, None, advantages, mask)
    with pytest.raises(TypeError, match="old_values must be a tensor, got NoneType"):
        token_losses.value_loss(x, None, advantages, mask, clip_value=0.2)
    with pytest.raises(TypeError, match="loss_mask must be a tensor, got list"):
        token_losses.sft_nll(x, mask.tolist())
    for name in ("clip_low", "clip_high"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0: -0.1"):
            token_losses.ppo_clip(x, old, advantages, mask, **{name: -0.1})
        with pytest.raises(ValueError, match=f"{name} must be at least 0: nan"):
            token_losses.gmpo(x, old, advantages, mask, **{name: math.nan})
    with pytest.raises(ValueError, match="dual_clip must be above 1: 1"):
        token_losses.ppo_clip(x, old, advantages, mask, dual_clip=1)
    with pytest.raises(ValueError, match="tau_neg must be above 0: 0"):
        token_losses.sapo(x, old, advantages, mask, tau_neg=0)
    with pytest.raises(TypeError, match="clip_high must be a number, got '0.2' of type str"):
        token_losses.cispo(x, old, advantages, mask, clip_high="0.2")
    with pytest.raises(ValueError, match="Unknown estimator 'k4'; expected one of k1, k2, k3"):
        token_losses.kl_penalty(x, old, mask, estimator="k4")
    with pytest.raises(ValueError, match="Unknown level 'geometric'; expected one of token, seq"):
        token_losses.truncated_importance_weights(x, old, mask, level="geometric")
