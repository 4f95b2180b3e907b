"""Token losses against naive float64 formulas, one token at a time, and what masks do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_loss_cases import CASES, INF, LOSSES, NUM_INPUTS, SEQUENCE_LOSSES, UNUSED, data, run


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
