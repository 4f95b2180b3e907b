"""agg_loss's seq-mean-token-mean on a CPU, with and without the kernel that makes one pass.

It must be exact for whatever masked losses and masks hold, and round no worse than `sum`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

from megatron_lossagg import agg_loss, row_means

MODE = "seq-mean-token-mean"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIDTH = 96  # three chunks of 32, the shortest for which the one-pass kernel is taken


@pytest.fixture(params=[False, True], ids=["two passes", "one pass"])
def one_pass(request, monkeypatch):
    """Small microbatches through either kernel; counts the calls of the one-pass kernel."""
    calls = []
    kernel = row_means._batch_norm_backward
    monkeypatch.setattr(row_means, "_NUM_FOR_ONE_PASS", 1 if request.param else 2**62)
    monkeypatch.setattr(
        row_means, "_batch_norm_backward", lambda *args: calls.append(args) or kernel(*args)
    )
    yield request.param
    assert bool(calls) == request.param


def ragged(dtype=torch.float64, width=WIDTH):
    """Losses and a mask with holes, a full row, an empty row and a prefix."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, width, generator=generator) < 0.5
    mask[0], mask[1], mask[2] = True, False, torch.arange(width) < width // 3
    return torch.randn(6, width, generator=generator, dtype=torch.float64).to(dtype), mask


def loop_reference(losses, mask, count=None):
    """The mean of the rows' means in exact sums, row by row."""
    rows = [row[valid].double().tolist() for row, valid in zip(losses, mask, strict=True)]
    means = [math.fsum(row) / len(row) for row in rows if row]
    return math.fsum(means) / (len(means) if count is None else count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [None, 11, 2.5])
def test_value_and_gradient(one_pass, dtype, count):
    """The value is that of a loop; the gradient is 3 / (n_s * count) to the bit, or 0."""
    losses, mask = ragged(dtype)
    losses.requires_grad_()
    value = agg_loss(losses, mask, MODE, global_batch_size=count)
    (3 * value).backward()
    accurate = torch.promote_types(dtype, torch.float32)
    rtol = 1e-14 if dtype == torch.float64 else 1e-6
    assert value.dtype == accurate
    assert value.item() == pytest.approx(loop_reference(losses.detach(), mask, count), rel=rtol)
    divisor = mask.sum(dim=-1, keepdim=True).to(accurate).clamp(min=1) * (count or 5)
    expected = torch.where(mask, torch.full_like(divisor, 3) / divisor, 0)
    assert torch.equal(losses.grad, expected.to(dtype))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_at_masked_positions(one_pass, dtype, garbage):
    """One NaN or inf, or one in every masked position: not a bit of value or gradient changes."""
    clean, mask = ragged(dtype)
    masked = (~mask).nonzero()
    one, last, every = clean.clone(), clean.clone(), clean.masked_fill(~mask, garbage)
    one[tuple(masked[0])] = last[tuple(masked[-1])] = garbage
    results = []
    for losses in (clean, one, last, every):
        losses.requires_grad_()
        value = agg_loss(losses, mask, MODE)
        value.backward()
        results.append((value.detach(), losses.grad))
    for value, gradient in results[1:]:
        assert torch.equal(value, results[0][0]) and torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_at_valid_positions_shows(one_pass, dtype, bad):
    """It reaches the value as it is, also next to masked garbage; the gradient stays exact."""
    losses, mask = ragged(dtype)
    clean = losses.clone().requires_grad_()
    agg_loss(clean, mask, MODE).backward()
    losses = losses.masked_fill(~mask, math.nan)
    losses[2, 3] = bad
    value = agg_loss(losses.requires_grad_(), mask, MODE)
    value.backward()
    assert value.isnan() if math.isnan(bad) else value.item() == bad
    assert torch.equal(losses.grad, clean.grad)


def test_mask_is_a_selection(one_pass):
    """Whatever is not 0 counts once: weights, negative and tiny numbers; -0 does not count."""
    losses, mask = ragged(torch.float32)
    expected = agg_loss(losses, mask, MODE)
    for number in (0.5, -1.0, 3.0, 1e-40, math.inf, math.nan):
        assert torch.equal(agg_loss(losses, torch.where(mask, number, -0.0), MODE), expected)
    assert torch.equal(agg_loss(losses, mask * 7, MODE), expected)


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_count_of_zero(zero):
    """Contradicts a valid row, which inf shows; without one it is right, and the mean is 0."""
    losses, mask = ragged()
    found = agg_loss(losses.abs(), mask, MODE, global_batch_size=zero)
    assert found.item() == math.inf
    assert agg_loss(losses, torch.zeros_like(mask), MODE, global_batch_size=zero).item() == 0


def test_layouts_of_memory(one_pass):
    """Transposed, strided and expanded losses and masks give what their copies give."""
    losses, mask = ragged()
    wide, row = losses.repeat_interleave(2, dim=1), mask[2].expand_as(mask)
    expected = agg_loss(losses, mask, MODE).item()
    assert agg_loss(wide[:, ::2], mask, MODE).item() == pytest.approx(expected, rel=1e-14)
    leaf = losses.t().contiguous().t().requires_grad_()
    value = agg_loss(leaf, mask.t().contiguous().t(), MODE)
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-14)
    assert leaf.grad.count_nonzero() == mask.sum()
    expected = agg_loss(losses, row.contiguous(), MODE)
    assert agg_loss(losses, row, MODE).item() == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("shape", [(0, 96), (3, 0), (0, 0), (2, 31), (1, 1)])
def test_shapes_without_chunks(monkeypatch, shape):
    """No rows, no columns, or a width that does not divide: exactly 0, or the mean of ones."""
    monkeypatch.setattr(row_means, "_NUM_FOR_ONE_PASS", 1)
    losses = torch.ones(shape, requires_grad=True)
    value = agg_loss(losses, torch.ones(shape), MODE)
    value.backward()
    assert value.item() == (1.0 if losses.numel() else 0.0)
    assert losses.grad.sum().item() == pytest.approx(value.item(), rel=1e-6)


def test_backward_passes(one_pass):
    """Twice over one graph, and differentiable: the mean is linear in the losses."""
    losses, mask = ragged()
    losses.requires_grad_()
    value = agg_loss(losses, mask, MODE)
    [first] = torch.autograd.grad(value, losses, retain_graph=True)
    kept = first.clone()
    [second] = torch.autograd.grad(value, losses, 2 * value.new_ones(()))
    assert torch.equal(first, kept) and torch.equal(second, 2 * kept)
    value = agg_loss(losses.square(), mask, MODE)
    [gradient] = torch.autograd.grad(value, losses, create_graph=True)
    [second] = torch.autograd.grad(gradient.sum(), losses)
    torch.testing.assert_close(second, 2 * kept, rtol=1e-14, atol=0)
    torch.autograd.gradcheck(lambda values: agg_loss(values, mask, MODE), losses)


@pytest.mark.parametrize("upstream", [math.inf, math.nan])
def test_a_gradient_that_overflowed_stays_off_masked_positions(one_pass, upstream):
    """The gradient is a selection, too: exactly 0 where the mask is."""
    losses, mask = ragged(torch.float32)
    losses.requires_grad_()
    agg_loss(losses, mask, MODE).backward(torch.tensor(upstream))
    assert (losses.grad[~mask] == 0).all() and not losses.grad[mask].isfinite().any()


def test_a_gradient_that_a_count_makes_overflow_stays_off_masked_positions():
    """Counts below 1 are divided by, too."""
    losses, mask = ragged(torch.float32)
    losses.requires_grad_()
    (agg_loss(losses, mask, MODE, global_batch_size=1e-6) * 1e37).backward()
    assert (losses.grad[~mask] == 0).all() and losses.grad[mask].isinf().all()


def test_without_a_graph(one_pass):
    """no_grad, inference_mode and losses without a gradient give the same value, in any order."""
    losses, mask = ragged()
    row_means._zeros_and_ones.cache_clear()
    with torch.inference_mode():
        agg_loss(losses, mask, MODE)
    expected = agg_loss(losses.requires_grad_(), mask, MODE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = agg_loss(losses, mask, MODE)
            assert torch.equal(found, expected) and not found.requires_grad
    expected.backward()
    assert losses.grad.isfinite().all()
    assert not agg_loss(losses.detach(), mask, MODE).requires_grad


def test_forward_mode(one_pass):
    """The tangent is the mean of the tangents, whatever it is at masked positions."""
    losses, mask = ragged()
    tangents = torch.rand_like(losses)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(losses, tangents.masked_fill(~mask, math.nan))
        value, tangent = forward_ad.unpack_dual(agg_loss(dual, mask, MODE, global_batch_size=3))
    assert value.item() == pytest.approx(loop_reference(losses, mask, 3), rel=1e-14)
    assert tangent.item() == pytest.approx(loop_reference(tangents, mask, 3), rel=1e-14)


def test_transforms():
    """torch.func sees the operators of a device: grad, jvp and vmap work."""
    losses, mask = ragged()
    value = agg_loss(losses.requires_grad_(), mask, MODE)
    value.backward()
    losses, gradient = losses.detach(), losses.grad

    def mean(values):
        return agg_loss(values, mask, MODE)

    torch.testing.assert_close(torch.func.grad(mean)(losses), gradient, rtol=1e-14, atol=0)
    found, tangent = torch.func.jvp(mean, (losses,), (losses,))
    assert found.item() == tangent.item() == pytest.approx(value.item(), rel=1e-13)
    batched = torch.func.vmap(mean)(losses.expand(2, -1, -1))
    assert batched.tolist() == pytest.approx(2 * [value.item()], rel=1e-13)


@pytest.mark.parametrize("kind", ["random", "one-signed", "constant"])
def test_rounds_no_worse_than_sum(kind):
    """2^21 losses in float32: errors against float64 beside those of torch's sum of each row."""
    generator = torch.Generator().manual_seed(0)
    ours, sums = 0.0, 0.0
    for _ in range(8):
        losses = torch.randn(64, 32768, generator=generator)
        losses = {
            "random": losses,
            "one-signed": losses.abs(),
            "constant": torch.full_like(losses, torch.rand((), generator=generator).item()),
        }[kind]
        mask = torch.rand(64, 32768, generator=generator) < 0.7
        lengths = mask.sum(dim=-1)
        exact = ((losses.double() * mask).sum(dim=-1) / lengths).mean()
        unit = 2**-24 * (losses.abs() * mask).sum(dim=-1).div(lengths).mean()
        ours += ((agg_loss(losses, mask, MODE) - exact) / unit).square().item()
        of_sum = ((losses * mask).sum(dim=-1) / lengths).mean()
        sums += ((of_sum - exact) / unit).square().item()
    # Of eight draws, root mean squares differ by some tens of percent. Rows summed by torch.dot are
    # off by 5 (random) to 50 times (constant) as much.
    assert math.sqrt(ours) <= 2 * math.sqrt(sums)
