"""Token losses against naive float64 formulas, one token at a time, and their properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_lossagg import LossAggregator, ParallelGroups, token_losses

INF = math.inf


class Case(NamedTuple):
    """A loss of (x, other, advantages, mask) and its formula for one token of (x, other, A)."""

    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    formula: Callable[[Tensor, Tensor, Tensor], Tensor]
    num_inputs: int = 3
    is_smooth: bool = True  # the gradient is that of the value: no stop-gradient in it


def ppo(low, high, dual=None):
    def formula(x, old, a):
        ratio = torch.exp(x - old)
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        if dual is not None and a < 0:
            loss = torch.minimum(loss, -a * dual)
        return loss

    return Case(
        lambda x, old, a, mask: token_losses.ppo_clip(
            x, old, a, mask, clip_low=low, clip_high=high, dual_clip=dual
        ),
        formula,
    )


def cispo(low, high):
    def formula(x, old, a):
        weight = torch.exp(x.detach() - old).clamp(1 - low, 1 + high)
        return -weight * a * x

    return Case(
        lambda x, old, a, mask: token_losses.cispo(x, old, a, mask, clip_low=low, clip_high=high),
        formula,
        is_smooth=False,
    )


def sapo(tau_pos, tau_neg):
    def formula(x, old, a):
        tau = tau_pos if a > 0 else tau_neg
        return -a * 4 / tau / (1 + torch.exp(-tau * (torch.exp(x - old) - 1)))

    return Case(
        lambda x, old, a, mask: token_losses.sapo(
            x, old, a, mask, tau_pos=tau_pos, tau_neg=tau_neg
        ),
        formula,
    )


def kl(estimator):
    def formula(x, ref, _):
        k2 = (x - ref) ** 2 / 2
        value = {
            "k1": x - ref,
            "k2": k2,
            "k3": torch.exp(ref - x) - (ref - x) - 1,
        }[estimator[:2]]
        if estimator.endswith("+"):
            return value.detach() + k2 - k2.detach()
        return value

    return Case(
        lambda x, ref, _, mask: token_losses.kl_penalty(x, ref, mask, estimator=estimator),
        formula,
        num_inputs=2,
        is_smooth=not estimator.endswith("+"),
    )


def value(clip):
    def formula(v, old, returns):
        loss = (v - returns) ** 2
        if clip is not None:
            clipped = torch.minimum(torch.maximum(v, old - clip), old + clip)
            loss = torch.maximum(loss, (clipped - returns) ** 2)
        return loss / 2

    return Case(
        lambda v, old, returns, mask: token_losses.value_loss(
            v, None if clip is None else old, returns, mask, clip_value=clip
        ),
        formula,
    )


CASES = {
    "ppo": ppo(0.2, 0.2),
    "ppo-clip-higher": ppo(0.2, 0.28),
    "ppo-dual": ppo(0.2, 0.3, 1.5),
    "ppo-dual-below-high": ppo(0.2, 0.3, 1.1),
    "ppo-no-lower-bound": ppo(2.0, 0.3),
    "ppo-unclipped": Case(
        lambda x, old, a, mask: token_losses.ppo_clip(x, old, a, mask, clip_low=INF, clip_high=INF),
        lambda x, old, a: -a * torch.exp(x - old),
    ),
    "policy-gradient": Case(
        lambda x, _, a, mask: token_losses.policy_gradient(x, a, mask), lambda x, _, a: -a * x
    ),
    "cispo": cispo(0.3, 0.2),
    "cispo-no-lower-bound": cispo(INF, 0.2),
    "sapo": sapo(1.0, 1.05),
    "sapo-hot": sapo(0.3, 4.0),
    "tis": Case(
        lambda x, other, _, mask: token_losses.truncated_importance_weights(x, other, mask),
        lambda x, other, _: torch.exp((x - other).detach()).clamp(max=2.0) + 0 * x,
        num_inputs=2,
        is_smooth=False,
    ),
    **{f"kl-{name}": kl(name) for name in ("k1", "k2", "k3", "k1+", "k3+")},
    "value": value(None),
    "value-clipped": value(0.4),
    "sft": Case(lambda x, _o, _a, mask: token_losses.sft_nll(x, mask), lambda x, _o, _a: -x, 1),
    "entropy": Case(
        lambda x, _o, _a, mask: token_losses.entropy_bonus(x, mask), lambda x, _o, _a: -x, 1
    ),
}
# The losses of whole sequences share the properties of masking; test_token_losses_sequences.py has
# their formulas.
SEQUENCE_LOSSES = {
    "gspo": lambda x, old, a, mask: token_losses.gspo(x, old, a, mask, clip_low=0.2, clip_high=0.3),
    "gmpo": token_losses.gmpo,
    "tis-sequence": lambda x, other, _, mask: token_losses.truncated_importance_weights(
        x, other, mask, level="sequence"
    ),
}
NUM_INPUTS = {name: case.num_inputs for name, case in CASES.items()} | {
    "gspo": 3,
    "gmpo": 3,
    "tis-sequence": 2,
}
UNUSED = {"policy-gradient": (1,), "value": (1,)}  # inputs that a case does not read
LOSSES = {name: case.loss for name, case in CASES.items()} | SEQUENCE_LOSSES


def data(seed=0, dtype=torch.float64):
    """(x, other, A, mask) [5, 9]: log-probs with ratios on both sides of any bound, A of any sign,

    0 among them; a mask with holes and a row without valid tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    x = -torch.rand(5, 9, generator=generator, dtype=torch.float64) * 3
    other = x + torch.randn(5, 9, generator=generator, dtype=torch.float64) * 0.6
    advantages = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    advantages[1, 2:5] = 0
    mask = torch.rand(5, 9, generator=generator) < 0.7
    mask[3] = False
    mask[1] = True
    return x.to(dtype), other.to(dtype), advantages.to(dtype), mask


def run(loss, x, other, advantages, mask):
    """(values, gradient of x) of a loss; random weights, so that tokens cannot be exchanged."""
    x = x.clone().requires_grad_()
    values = loss(x, other, advantages, mask)
    weights = torch.rand(
        values.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    total = (values * weights).sum()
    gradient = torch.zeros_like(x)
    if total.requires_grad:
        [gradient] = torch.autograd.grad(total, [x])
    return values.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name, dtype):
    """A Python loop over tokens, float64: 1e-13; float32 inputs: 1e-5."""
    case = CASES[name]

    def loop(x, other, advantages, mask):
        rows = [
            [
                case.formula(x[i, j], other[i, j], advantages[i, j]) if mask[i, j] else 0 * x[0, 0]
                for j in range(mask.shape[1])
            ]
            for i in range(mask.shape[0])
        ]
        return torch.stack([torch.stack(row) for row in rows])

    x, other, advantages, mask = data(dtype=dtype)
    values, gradient = run(case.loss, x, other, advantages, mask)
    expected, expected_gradient = run(loop, x.double(), other.double(), advantages.double(), mask)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    assert values.dtype == dtype and values.shape == mask.shape
    torch.testing.assert_close(values.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)
    assert (values[mask] != 0).any() and (values[~mask] == 0).all() and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.is_smooth])
def test_gradcheck(name):
    """The gradient is the derivative of the value, by finite differences."""
    x, other, advantages, mask = data(3)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: CASES[name].loss(x, other, advantages, mask), [x])


@given(
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([math.nan, INF, -INF, 1e38]),
    st.integers(0, 2),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_what_is_masked_changes_no_bit(name, garbage, which, seed, dtype):
    """Garbage in any input at masked positions: the same bits as with 0 there."""
    *inputs, mask = data(seed, dtype)
    clean = [value.masked_fill(~mask, 0) for value in inputs]
    dirty = list(clean)
    dirty[which] = clean[which].masked_fill(~mask, garbage)
    expected = run(LOSSES[name], *clean, mask)
    found = run(LOSSES[name], *dirty, mask)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not found[1].isnan().any() and (found[1][~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_nan_at_a_valid_token_shows(name):
    """In every input: NaN in that token's loss, and in its whole sequence's if it is one's."""
    for which in range(NUM_INPUTS[name]):
        if which in UNUSED.get(name, ()):
            continue
        *inputs, mask = data(1)
        inputs[which][1, 3] = math.nan
        values = LOSSES[name](*inputs, mask)
        assert values[1, 3].isnan(), which
        others = torch.ones_like(mask)
        others[1] = name not in SEQUENCE_LOSSES
        others[1, 3] = False
        assert not values[others].isnan().any()


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_valid_is_zero_that_trains(name):
    """No valid token: exactly 0, and where the loss has a gradient at all, one of exactly 0."""
    x, other, advantages, mask = data()
    x = x.fill_(math.nan).requires_grad_()
    values = LOSSES[name](x, other, advantages, torch.zeros_like(mask))
    assert torch.equal(values, torch.zeros_like(values))
    if name not in ("tis", "tis-sequence"):
        values.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name):
    """bfloat16 inputs give the float32 loss of the same numbers; a mask of any dtype is one."""
    *inputs, mask = data(dtype=torch.bfloat16)
    expected = LOSSES[name](*(value.float() for value in inputs), mask)
    for like_mask in (mask, mask.long(), mask.float() / 37):
        found = LOSSES[name](*inputs, like_mask)
        assert found.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_no_value_is_looked_at(name):
    """On a device without values: nothing in it needs the host to wait for the device."""
    inputs = [value.to("meta") for value in data()]
    assert LOSSES[name](*inputs).shape == inputs[0].shape


@pytest.mark.parametrize(
    "name", [n for n in LOSSES if not n.startswith(("kl", "tis", "sft", "entropy"))]
)
def test_constants_get_no_gradient(name):
    """Old log-probs that forgot to be detached, such as old = log_probs, do not cancel anything."""
    x, _, advantages, mask = data()
    _, expected = run(LOSSES[name], x, x, advantages, mask)
    x.requires_grad_()
    weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (LOSSES[name](x, x, advantages, mask) * weights).sum().backward()
    assert torch.equal(x.grad, expected)


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
