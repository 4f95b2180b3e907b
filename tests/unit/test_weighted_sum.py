"""The masked weighted sum, and the weights that a microbatch carries."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from one_process import ALL_MODES, REGIMES, make_aggregator, make_microbatch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lossagg import LossAggError, agg_loss, weighted_sum
from megatron_lossagg.weighted_sum import (
    looking_is_free,
    masked_weighted_sum,
    weights_of,
    where_nonzero,
)


def test_value_gradient_and_dtype():
    """S = sum of w * l over w != 0; the gradient is w; at least float32."""
    losses = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    weights = torch.tensor([[0.5, 0.0, 2.0]])
    total = masked_weighted_sum(losses, weights)
    assert total.dtype == torch.float32 and total.item() == 6.5
    total.backward()
    assert torch.equal(losses.grad.float(), weights)
    for losses_dtype, weights_dtype, expected in (
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ):
        total = masked_weighted_sum(
            torch.ones(1, 1, dtype=losses_dtype), torch.ones(1, 1, dtype=weights_dtype)
        )
        assert total.dtype == expected


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_counts_only_where_the_weight_is_not_zero(garbage):
    """Value and gradient are exact next to garbage at weight 0; garbage at a valid token shows."""
    losses = torch.tensor([[1.0, garbage]], requires_grad=True)
    total = masked_weighted_sum(losses, torch.tensor([[3.0, 0.0]]))
    total.backward()
    assert total.item() == 3.0 and losses.grad.tolist() == [[3.0, 0.0]]
    shown = masked_weighted_sum(losses, torch.tensor([[3.0, 1.0]]))
    assert not torch.isfinite(shown)


def test_second_derivative_and_transforms():
    """S is linear in the losses, so what it adds to a second derivative is 0; vmap is refused."""
    losses = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    total = masked_weighted_sum(losses.square(), weights)
    [gradient] = torch.autograd.grad(total, losses, create_graph=True)
    [second] = torch.autograd.grad(gradient.sum(), losses)
    assert gradient.tolist() == [[1.0, 0.0]] and second.tolist() == [[1.0, 0.0]]
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(masked_weighted_sum)(losses.detach(), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_selection_is_exact_in_every_form(dtype):
    """Eager and compiled: tiny and negative weights count, -0 does not, a NaN weight shows."""
    values = torch.tensor([[1.0, 2.0, 3.0, math.nan, math.inf, 5.0] * 9], dtype=dtype)
    weights = torch.tensor([[1.0, -1.0, 1e-40, 0.0, -0.0, 2.0] * 9], dtype=dtype)
    expected = [1.0, 2.0, 3.0, 0.0, 0.0, 5.0] * 9
    assert where_nonzero(values, weights)[0].tolist() == expected
    assert torch.isnan(masked_weighted_sum(values, weights * math.nan))
    compiled = torch.compile(where_nonzero, backend="aot_eager", fullgraph=True)
    assert compiled(values, weights)[0].tolist() == expected


class Recorded(TorchDispatchMode):
    """Sees the operators as whatever records them does; a device's form of the sum runs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_looking_at_the_sum_changes_no_bit(monkeypatch, dtype, weights_dtype, garbage):
    """On a CPU selection is for sums that are not finite; value and gradient are a device's."""
    generator = torch.Generator().manual_seed(0)
    losses, weights = torch.randn(2, 5, 77, generator=generator)
    weights = weights.where(weights > 0, -0.0).to(weights_dtype)
    losses = losses.masked_fill(weights == 0, garbage).to(dtype)
    selections = []
    monkeypatch.setattr(
        weighted_sum, "where_nonzero", lambda *args: selections.append(args) or where_nonzero(*args)
    )
    results = []
    for as_recorded in (False, True):
        leaf = losses.clone().requires_grad_()
        with Recorded() if as_recorded else nullcontext():
            total = masked_weighted_sum(leaf, weights)
            (total * 1.7).backward()
        results.append((total.detach(), leaf.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert len(selections) == (1 if garbage == 0 else 2)


def test_a_value_is_looked_at_only_where_that_is_free():
    """Not where operators are recorded or transformed, nor off the CPU: a branch would be kept."""
    seen = []

    def look(losses, weights):
        seen.append(looking_is_free(losses, weights))
        return where_nonzero(losses, weights).sum()

    values = torch.ones(2, 3), torch.ones(2, 3)
    look(*values)
    assert seen.pop() and not seen
    with Recorded():
        look(*values)
    make_fx(look)(*values)
    make_fx(look, tracing_mode="fake")(*values)
    torch.jit.trace(look, values, check_trace=False)
    torch.func.grad(look)(*values)
    torch.func.vmap(look)(*values)
    look(*(value.to("meta") for value in values))
    look(torch.nn.Parameter(values[0]), values[1])
    compiled = torch.compile(looking_is_free, backend="eager", fullgraph=True)
    assert len(seen) >= 7 and not any(seen) and not compiled(*values)


def test_tensors_without_values():
    """On the meta device the sums have shapes and graphs."""
    losses = torch.ones(2, 3, device="meta", requires_grad=True)
    for total in (
        masked_weighted_sum(losses, torch.ones(2, 3, device="meta")),
        agg_loss(losses, torch.ones(2, 3, device="meta"), "seq-mean-token-mean"),
    ):
        total.backward()
        assert total.shape == () and losses.grad.shape == losses.shape


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_sum(shape):
    """Exactly 0, with a graph and an empty gradient."""
    losses = torch.ones(shape, requires_grad=True)
    total = masked_weighted_sum(losses, torch.ones(shape))
    total.backward()
    assert total.item() == 0 and losses.grad.shape == shape


def test_layouts_and_modes_of_autograd():
    """Strided and expanded tensors; without a graph; twice over one graph; weights in a graph."""
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, 6.0]])
    weights = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]], requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert masked_weighted_sum(losses, weights).item() == 43
    leaf = losses.t().contiguous().t().requires_grad_()
    total = masked_weighted_sum(leaf, weights)
    for _ in range(2):
        total.backward(retain_graph=True)
    assert total.item() == 43 and torch.equal(leaf.grad, 2 * weights) and weights.grad is None
    row = weights[:1].detach().expand(2, -1)
    assert masked_weighted_sum(losses[:, ::2], row[:, ::2]).item() == 1 + 6 + 4 + 12


@pytest.mark.parametrize("kind", ["random", "one-signed", "constant"])
def test_rounds_no_worse_than_sum(kind):
    """2^21 losses in float32 against float64, beside torch's sum of the products."""
    generator = torch.Generator().manual_seed(0)
    losses, weights = torch.randn(2, 64, 32768, generator=generator).abs()
    if kind == "random":
        losses = losses * torch.randn(64, 32768, generator=generator).sign()
    elif kind == "constant":
        losses, weights = torch.full_like(losses, 0.1), torch.full_like(weights, 1 / 3)
    products = losses.double() * weights.double()
    unit = products.abs().sum() * 2**-24
    error = abs(masked_weighted_sum(losses, weights) - products.sum()) / unit
    of_sum = abs((losses * weights).sum() - products.sum()) / unit
    assert error <= of_sum + 1e-3  # that of torch.dot is 0.07, 18 and 409


@REGIMES
@ALL_MODES
def test_everything_about_a_step_is_in_the_weights(mode, options, per_token):
    """Under a replayed graph step 1's loss_func runs on step 2's data in the same buffers."""
    aggregator = make_aggregator(mode, per_token=per_token, **options)
    first = aggregator.begin_step([make_microbatch([[1.0, 2.0, 3.0]], [[1, 1, 1]])])
    second = aggregator.begin_step([make_microbatch([[7.0, 8.0, 9.0]], [[0, 1, 0]])])
    buffer, other = next(first.data_iterator()[0]), next(second.data_iterator()[0])
    expected = second.loss_func(other, other["losses"])
    with torch.no_grad():
        buffer["losses"].copy_(other["losses"])
        buffer["loss_weights"].copy_(other["loss_weights"])
    found = first.loss_func(buffer, buffer["losses"])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[-1]["loss"], expected[-1]["loss"])
    if per_token:
        assert found[1].item() == expected[1].item() == 1


@pytest.mark.parametrize("microbatch", [{}, {"loss_mask": 1, 5: 2}, torch.ones(1), None])
def test_microbatch_without_weights(microbatch):
    """What was found, which field is missing and where microbatches come from."""
    with pytest.raises(LossAggError, match=r"no weights under 'loss_weights' \(found: .*data_iter"):
        weights_of(microbatch, "loss_weights")


@pytest.mark.parametrize("raw", [torch.ones(1, 2).long(), torch.ones(1, 2).bool(), [[1, 0]]])
def test_weights_that_became_integers(raw):
    """A raw mask, or weights that a broadcast cast to integers, would count as 0 or 1."""
    with pytest.raises(
        TypeError, match="field 'loss_mask' given to loss_func is .* floating point"
    ):
        weights_of({"loss_mask": raw}, "loss_mask")
