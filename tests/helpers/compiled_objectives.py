"""Objectives with `compile=True`, and what they give beside the same ones without.

Those without are compared with plain autograd by other tests.
"""

from __future__ import annotations

import math

import pytest
import torch
from one_process import make_aggregator

from megatron_lossagg import LossTerm, token_losses


def policy(output, microbatch):
    losses = token_losses.ppo_clip(
        output, microbatch["old"], microbatch["advantages"], microbatch["loss_mask"], dual_clip=3.0
    )
    log_ratio = (output - microbatch["old"]).detach()
    return losses, {"log_ratio": log_ratio, "largest": log_ratio}


def kl(output, microbatch):
    return token_losses.kl_penalty(output, microbatch["old"], microbatch["loss_mask"])


def aggregator(**options):
    terms = [
        LossTerm(
            "policy",
            policy,
            "seq-mean-token-mean",
            metrics={"log_ratio": "tokens", "largest": "max"},
        ),
        LossTerm("kl", kl, "token-mean", coefficient=lambda iteration: 0.1 * iteration),
    ]
    return make_aggregator(None, loss_fn=None, terms=terms, **options)


def microbatch_of(rows, width, seed=0, *, masked=math.nan):
    generator = torch.Generator().manual_seed(seed)

    def random():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    old, advantages, losses = random(), random(), random()
    losses[mask == 0] = masked
    return {
        "losses": losses.requires_grad_(),
        "old": old,
        "advantages": advantages,
        "loss_mask": mask,
    }


def values_and_gradient(made, microbatch, iteration=1, output_of=None):
    step = made.begin_step([microbatch], iteration=iteration)
    [planned] = step.microbatches
    losses = planned["losses"]
    losses.grad = None
    loss, report = step.loss_func(planned, losses if output_of is None else output_of(losses))
    loss.backward()
    values = step.report([report])
    step.validate()
    return values, planned["losses"].grad


def remaining(made):
    """The names of what is compiled and has not failed."""
    return [type(compiled).__name__ for compiled in made.settings.evaluate.remaining]


BOTH = ["OnePass", "TwoPasses"]


def assert_same(made, plain, microbatch, iteration=1, *, output_of=None):
    """Values and gradients of a compiled objective and of the same one uncompiled."""
    outcomes = []
    for aggregator in (made, plain):
        outcomes.append(values_and_gradient(aggregator, microbatch, iteration, output_of))
    (found, gradient), (expected, plain_gradient) = outcomes
    assert found == pytest.approx(expected, rel=1e-14, nan_ok=True)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-13, atol=1e-16)
    assert gradient.dtype == plain_gradient.dtype
    return gradient
