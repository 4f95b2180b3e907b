"""Every token loss with its formula for one token, and data for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lossagg import token_losses

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
