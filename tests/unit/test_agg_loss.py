"""agg_loss: verl's signature, the documented table, exact masking and any split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lossagg import agg_loss

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
VARIANTS = [*((mode, "sum") for mode in MODES), ("seq-mean-token-sum-norm", "seq-mean")]


def loop_reference(
    losses,
    mask,
    mode,
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
    norm_semantics="sum",
):
    """The table of the documentation, with one Python loop per sum."""
    losses, mask = np.asarray(losses, dtype=np.float64), np.asarray(mask)
    num_tokens = num_seqs = 0
    token_total = mean_total = 0.0
    for row in range(mask.shape[0]):
        row_total, row_tokens = 0.0, 0
        for column in range(mask.shape[1]):
            if mask[row, column] != 0:
                row_total += losses[row, column]
                row_tokens += 1
        num_tokens += row_tokens
        num_seqs += row_tokens > 0
        token_total += row_total
        mean_total += row_total / row_tokens if row_tokens else 0.0
    tokens = num_tokens if batch_num_tokens is None else batch_num_tokens
    seqs = num_seqs if global_batch_size is None else global_batch_size
    width = mask.shape[1] if loss_scale_factor is None else loss_scale_factor
    if num_tokens == 0:
        return 0.0
    if mode == "token-mean":
        return token_total / tokens * dp_size
    if mode == "token-sum":
        return token_total * dp_size
    if mode == "seq-mean-token-sum":
        return token_total / seqs * dp_size
    if mode == "seq-mean-token-mean":
        return mean_total / seqs * dp_size
    if norm_semantics == "sum":
        return token_total / width
    return token_total / seqs / width * dp_size


def ragged(num_rows=7, width=5, seed=0):
    """Random losses and a mask with holes, a full row and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_rows, width, generator=generator) < 0.5
    mask[0], mask[1] = True, False
    return torch.randn(num_rows, width, generator=generator, dtype=torch.float64), mask


@st.composite
def masks(draw):
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    return draw(st.lists(row, min_size=num_rows, max_size=num_rows))


@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
@pytest.mark.parametrize(
    "given_counts",
    [
        {},
        {"dp_size": 3},
        {"dp_size": 3, "batch_num_tokens": 29, "global_batch_size": 11},
        {"dp_size": 3, "batch_num_tokens": 29, "global_batch_size": 11, "loss_scale_factor": 9},
    ],
    ids=["defaults", "dp", "counts", "all"],
)
def test_value_is_that_of_the_table(mode, norm_semantics, given_counts):
    """Every mode, with defaults and with everything given, equals the loop over the table."""
    losses, mask = ragged()
    expected = loop_reference(losses, mask, mode, norm_semantics=norm_semantics, **given_counts)
    found = agg_loss(losses, mask, mode, norm_semantics=norm_semantics, **given_counts)
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-14)


def test_defaults_are_local_counts_and_the_mask_width():
    """T = local mask sum, B = local rows with a token, L = mask width; no dp_size in the norm."""
    losses = torch.tensor([[1.0, 2.0, 3.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    values = {mode: agg_loss(losses, mask, mode).item() for mode in MODES}
    assert values["token-mean"] == 11 / 4
    assert values["seq-mean-token-sum"] == 11 / 2
    assert values["seq-mean-token-mean"] == (2 + 5) / 2
    assert values["seq-mean-token-sum-norm"] == pytest.approx(11 / 3, rel=1e-6)
    norm = agg_loss(
        losses, mask, "seq-mean-token-sum-norm", 4, global_batch_size=7, loss_scale_factor=11
    )
    assert norm.item() == pytest.approx(1.0, rel=1e-6)


def test_arguments_have_verls_names_and_order():
    """Positional calls of verl's function mean the same here."""
    losses, mask = ragged()
    positional = agg_loss(losses, mask, "seq-mean-token-sum", 2, 10, 5, 8)
    named = agg_loss(
        loss_mat=losses,
        loss_mask=mask,
        loss_agg_mode="seq-mean-token-sum",
        dp_size=2,
        batch_num_tokens=10,
        global_batch_size=5,
        loss_scale_factor=8,
    )
    assert positional == named
    assert positional.item() == pytest.approx(losses[mask].sum().item() / 5 * 2)


@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
@pytest.mark.parametrize("dp_size", [1, 3])
def test_counts_may_be_tensors_or_floats(mode, norm_semantics, dp_size):
    """A count as int, float, int64 tensor or float64 tensor gives the same value."""
    losses, mask = ragged()
    values = [
        agg_loss(
            losses,
            mask,
            mode,
            dp_size,
            batch_num_tokens=kind(31),
            global_batch_size=kind(11),
            norm_semantics=norm_semantics,
        )
        for kind in (int, float, torch.tensor, lambda n: torch.tensor(float(n)))
    ]
    assert all(torch.equal(value, values[0]) for value in values)


def test_float_count_is_not_rounded_to_float32():
    """A Python float as count keeps float64 precision for float64 losses."""
    losses, mask = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1)
    assert agg_loss(losses, mask, "token-mean", batch_num_tokens=0.1).item() == 10.0


@given(masks(), st.data())
def test_any_split_with_global_counts_sums_to_the_whole(mask, data):
    """Parts of a batch, given the global counts, add up to the value of the whole batch."""
    mask = torch.tensor(mask)
    losses = torch.arange(1, mask.numel() + 1, dtype=torch.float64).view(mask.shape) / 8
    part_of_row = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask)))
    )
    counts = {
        "batch_num_tokens": mask.sum(),
        "global_batch_size": (mask.sum(dim=1) > 0).sum(),
        "loss_scale_factor": 16,
    }
    for mode, norm_semantics in VARIANTS:
        whole = agg_loss(losses, mask, mode, norm_semantics=norm_semantics)
        if mode == "seq-mean-token-sum-norm":
            whole = whole * mask.shape[1] / 16
        parts = [
            agg_loss(
                losses[part_of_row == part],
                mask[part_of_row == part],
                mode,
                norm_semantics=norm_semantics,
                **counts,
            )
            for part in range(3)
        ]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
def test_masked_values_change_nothing(mode, norm_semantics, dtype, garbage):
    """NaN, inf or 1e38 at a masked position: same bits, and a gradient of exactly 0 there."""
    clean, mask = ragged()
    clean = clean.to(dtype)
    dirty = clean.clone().masked_fill_(~mask, garbage)
    results = []
    for values in (clean, dirty):
        leaf = values.requires_grad_()
        value = agg_loss(leaf, mask, mode, norm_semantics=norm_semantics)
        value.backward()
        results.append((value.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[1][1][~mask] == 0).all()
    assert (results[1][1][mask] != 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
def test_bad_value_at_a_valid_token_shows(mode, norm_semantics, bad):
    """Selection hides masked garbage only: a valid NaN or inf reaches the result."""
    losses, mask = ragged()
    losses[0, 0] = bad
    found = agg_loss(losses, mask, mode, norm_semantics=norm_semantics)
    assert torch.isnan(found) if math.isnan(bad) else torch.isinf(found)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1, 1)])
@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
@pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}])
def test_empty_mask_gives_zero_that_trains(shape, mode, norm_semantics, counts):
    """No valid token: exactly 0, still attached to the graph, finite zero gradients."""
    losses = torch.full(shape, math.nan).requires_grad_()
    found = agg_loss(losses, torch.zeros(shape), mode, norm_semantics=norm_semantics, **counts)
    assert found.item() == 0.0 and found.requires_grad
    found.backward()
    assert torch.equal(losses.grad, torch.zeros(shape))


def test_count_of_zero_with_valid_tokens_is_not_hidden():
    """A global count of 0 contradicts a valid token: inf shows it, 0 would hide it."""
    found = agg_loss(torch.ones(1, 2), torch.ones(1, 2), "token-mean", batch_num_tokens=0)
    assert torch.isinf(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
def test_low_precision_losses_are_summed_in_float32(mode, norm_semantics, dtype):
    """4096 ones in a row: a 16-bit sum would stop at 256 (bfloat16) or 2048 (float16)."""
    losses = torch.ones(2, 4096, dtype=dtype)
    found = agg_loss(losses, torch.ones(2, 4096), mode, norm_semantics=norm_semantics)
    expected = loop_reference(
        np.ones((2, 4096)), np.ones((2, 4096)), mode, norm_semantics=norm_semantics
    )
    assert found.dtype == torch.float32
    assert found.item() == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_mask_dtype_does_not_matter(dtype):
    """0/1 masks of any dtype are the same mask; strides do not matter either."""
    losses, mask = ragged()
    expected = agg_loss(losses, mask, "seq-mean-token-mean")
    assert torch.equal(agg_loss(losses, mask.to(dtype), "seq-mean-token-mean"), expected)
    transposed = agg_loss(
        losses.t().contiguous().t(), mask.to(dtype).t().contiguous().t(), "seq-mean-token-mean"
    )
    assert transposed.item() == pytest.approx(expected.item(), rel=1e-14)


def test_mask_is_not_part_of_the_graph():
    """A mask that requires grad gets none: it is what is counted, not what is trained."""
    losses, mask = ragged()
    mask = mask.double().requires_grad_()
    agg_loss(losses.requires_grad_(), mask, "token-mean").backward()
    assert mask.grad is None and losses.grad is not None


@pytest.mark.parametrize("garbage", [9.0, math.nan, math.inf])
def test_public_report_masked_values(garbage):
    """Public report 13: masked 70 and -30 (or NaN, inf) next to valid 2 and 4."""
    losses = torch.tensor([[2.0, garbage], [4.0, -garbage]])
    mask = torch.tensor([[1, 0], [1, 0]])
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert agg_loss(losses, mask, mode).item() == 3.0
    norm = agg_loss(
        losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=2, norm_semantics="seq-mean"
    )
    assert norm.item() == 1.5


def test_public_report_tool_tokens():
    """Public report 19: the count comes from the mask, not from the response length."""
    losses, mask = torch.tensor([[3.0, 3, 7, 7, 3]]), torch.tensor([[1, 1, 0, 0, 1]])
    assert agg_loss(losses, mask, "token-mean").item() == 3.0


def test_unknown_options_name_the_known_ones():
    """The message repeats what was passed and lists what exists."""
    losses, mask = ragged()
    with pytest.raises(ValueError, match=f"'token_mean'; expected one of {', '.join(MODES)}\\.$"):
        agg_loss(losses, mask, "token_mean")
    for known in ("unit-mean-token-mean", "length-power-2"):
        with pytest.raises(ValueError, match=f"cannot compute '{known}', only verl's .*; use Los"):
            agg_loss(losses, mask, known)
    with pytest.raises(ValueError, match="Unknown loss_agg_mode None"):
        agg_loss(losses, mask, None)
    with pytest.raises(ValueError, match=r"Unknown loss_agg_mode \['token-mean'\]"):
        agg_loss(losses, mask, ["token-mean"])
    with pytest.raises(ValueError, match="norm_semantics='mean' does not exist; expected 'sum'"):
        agg_loss(losses, mask, "token-mean", norm_semantics="mean")


def test_wrong_inputs_are_refused():
    """Shapes that differ or broadcast, integer losses, an L that cannot divide."""
    losses, mask = ragged()
    with pytest.raises(ValueError, match=r"one shape .* got \(7, 5\) and \(7, 4\)"):
        agg_loss(losses, mask[:, :4], "token-mean")
    with pytest.raises(ValueError, match=r"got \(7, 5\) and \(1, 5\)"):
        agg_loss(losses, mask[:1], "token-mean")
    with pytest.raises(ValueError, match=r"got \(5,\) and \(5,\)"):
        agg_loss(losses[0], mask[0], "token-mean")
    with pytest.raises(TypeError, match=r"expects floating-point losses, got torch\.int64"):
        agg_loss(mask.long(), mask, "token-mean")
    with pytest.raises(ValueError, match="loss_scale_factor=0 cannot divide"):
        agg_loss(losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=0)
    with pytest.raises(TypeError, match="loss_scale_factor must be a number, got '5' of type str"):
        agg_loss(losses, mask, "seq-mean-token-sum-norm", loss_scale_factor="5")
