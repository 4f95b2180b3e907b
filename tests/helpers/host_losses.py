"""Data and comparisons for the token losses of hosts."""

from __future__ import annotations

import importlib.util

import pytest
import torch

TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}


def skip_without(package, install):
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
