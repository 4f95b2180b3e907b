"""token_weights: every mode against loops in numpy, and the properties that follow from it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lossagg import GlobalCounts, ParallelGroups, count_global_batch, token_weights
from megatron_lossagg.modes import ModeSpec

L = 12.0
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
OPTIONS = [
    {
        "loss_agg_mode": mode,
        "loss_scale_factor": L,
        "norm_semantics": norm_semantics,
        "sequence_count": sequence_count,
    }
    for mode, norm_semantics, sequence_count in itertools.product(
        MODES, ("sum", "seq-mean"), ("valid", "nominal")
    )
]
ALONE = ParallelGroups.single_process()


def loop_reference(masks, sample_masks, loss_agg_mode, norm_semantics, sequence_count, **_):
    """Weights of all microbatches in float64, one Python loop per count."""
    rows = []  # (microbatch, row, valid columns)
    num_rows = 0
    for i, mask in enumerate(masks):
        for r in range(len(mask)):
            if sample_masks[i] is not None and sample_masks[i][r] == 0:
                continue
            num_rows += 1
            rows.append((i, r, [c for c in range(len(mask[r])) if mask[r][c] == 1]))
    num_tokens = sum(len(columns) for _, _, columns in rows)
    num_valid = sum(1 for _, _, columns in rows if columns)
    num_seqs = num_valid if sequence_count == "valid" else num_rows
    weights = [np.zeros((len(mask), len(mask[0]) if len(mask) else 0)) for mask in masks]
    for i, r, columns in rows:
        for c in columns:
            weights[i][r, c] = {
                "token-mean": 1 / num_tokens,
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / num_seqs,
                "seq-mean-token-mean": 1 / (num_seqs * len(columns)),
                "seq-mean-token-sum-norm": (
                    1 / L if norm_semantics == "sum" else 1 / (num_seqs * L)
                ),
            }[loss_agg_mode]
    return weights


def plugin_weights(masks, sample_masks, options, weight_dtype=torch.float64):
    masks = [torch.tensor(mask) for mask in masks]
    sample_masks = [None if s is None else torch.tensor(s) for s in sample_masks]
    counts = count_global_batch(masks, ALONE, sample_masks=sample_masks)
    weights = [
        token_weights(mask, counts=counts, sample_mask=s, weight_dtype=weight_dtype, **options)
        for mask, s in zip(masks, sample_masks, strict=True)
    ]
    return weights, counts


@st.composite
def batches(draw):
    """Some microbatches, each a ragged mask with or without a sample mask."""
    masks, sample_masks = [], []
    for _ in range(draw(st.integers(1, 3))):
        num_rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        row = st.lists(st.integers(0, 1), min_size=width, max_size=width)
        masks.append(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))
        marks = st.lists(st.integers(0, 1), min_size=num_rows, max_size=num_rows)
        sample_masks.append(draw(st.none() | marks))
    return masks, sample_masks


@given(batches())
def test_weights_equal_loops_and_sum_to_the_checksum(batch):
    """Any ragged batch, every mode and option: loop reference to 1e-15, checksum, exact zeros."""
    masks, sample_masks = batch
    for options in OPTIONS:
        expected = loop_reference(masks, sample_masks, **options)
        weights, counts = plugin_weights(masks, sample_masks, options)
        for found, wanted in zip(weights, expected, strict=True):
            assert found.dtype == torch.float64
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-15, atol=0)
        total = sum(w.sum().item() for w in weights)
        assert total == pytest.approx(ModeSpec(**options).checksum(counts).item(), rel=1e-14)


@given(batches(), st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(batch, random):
    """Permuting the rows of a microbatch permutes the weights, bit by bit."""
    masks, sample_masks = batch
    order = list(range(len(masks[0])))
    random.shuffle(order)
    permuted_masks = [[masks[0][i] for i in order], *masks[1:]]
    marks = sample_masks[0]
    permuted_marks = [None if marks is None else [marks[i] for i in order], *sample_masks[1:]]
    for options in OPTIONS:
        before, _ = plugin_weights(masks, sample_masks, options)
        after, _ = plugin_weights(permuted_masks, permuted_marks, options)
        assert torch.equal(after[0], before[0][order])
        assert all(map(torch.equal, after[1:], before[1:]))


@given(batches(), st.integers(1, 3), st.integers(0, 1))
def test_marked_padding_rows_change_nothing(batch, num_pad_rows, pad_value):
    """Rows with sample_mask 0 get weight 0 and leave all others as they were."""
    masks, sample_masks = batch
    width = len(masks[0][0])
    marks = [1] * len(masks[0]) if sample_masks[0] is None else sample_masks[0]
    padded = [masks[0] + [[pad_value] * width] * num_pad_rows, *masks[1:]]
    padded_marks = [marks + [0] * num_pad_rows, *sample_masks[1:]]
    for options in OPTIONS:
        before, _ = plugin_weights(masks, sample_masks, options)
        after, _ = plugin_weights(padded, padded_marks, options)
        assert torch.equal(after[0][: len(masks[0])], before[0])
        assert torch.equal(after[0][len(masks[0]) :], torch.zeros(num_pad_rows, width).double())
        assert all(map(torch.equal, after[1:], before[1:]))


@given(batches(), st.integers(1, 4))
def test_width_does_not_matter(batch, num_columns):
    """Public report 8: padding rows with masked columns leaves every weight as it was."""
    masks, sample_masks = batch
    widened = [[row + [0] * num_columns for row in mask] for mask in masks]
    for options in OPTIONS:
        before, _ = plugin_weights(masks, sample_masks, options)
        after, _ = plugin_weights(widened, sample_masks, options)
        for narrow, wide in zip(before, after, strict=True):
            assert torch.equal(wide[:, : narrow.shape[1]], narrow)
            assert (wide[:, narrow.shape[1] :] == 0).all()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_gradient_of_the_weighted_sum_is_the_weight(options):
    """d J / d l = w exactly."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    counts = count_global_batch([mask], ALONE)
    weights = token_weights(mask, counts=counts, weight_dtype=torch.float64, **options)
    losses = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    (weights * losses).sum().backward()
    assert torch.equal(losses.grad, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weight_dtype_rounds_once(dtype):
    """Weights are computed in float64 and rounded once to `weight_dtype`; float32 by default."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    counts = GlobalCounts(num_tokens=2**24 + 1, num_valid_seqs=7, num_seqs=7)
    found = token_weights(mask, "token-mean", counts, weight_dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, torch.full((1, 3), 1 / (2**24 + 1), dtype=torch.float64).to(dtype))
    assert token_weights(mask, "token-mean", counts).dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.float16, torch.int64, torch.bool, "float32", None, []])
def test_weight_dtype_that_cannot_hold_weights(bad):
    """float16 would round 1/T to 0 and integers to nothing: refused with the dtypes that work."""
    with pytest.raises(TypeError, match=r"one of torch\.float32, torch\.float64, torch\.bfloat16"):
        token_weights(torch.ones(1, 1), "token-mean", GlobalCounts(1, 1, 1), weight_dtype=bad)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_mask_dtype_and_strides_do_not_matter(dtype):
    """0/1 masks of any dtype and layout are the same mask."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    counts = count_global_batch([mask], ALONE)
    expected = token_weights(mask, "seq-mean-token-mean", counts)
    strided = mask.t().contiguous().t().to(dtype)
    assert torch.equal(token_weights(strided, "seq-mean-token-mean", counts), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_empty_batch_has_weight_zero(options, shape):
    """T = 0: finite zeros of the mask's shape in every mode."""
    mask = torch.zeros(shape)
    counts = count_global_batch([mask], ALONE)
    assert torch.equal(token_weights(mask, counts=counts, **options), torch.zeros(shape))


@pytest.mark.parametrize("mode", MODES)
def test_huge_batch_keeps_precision(mode):
    """10^12 tokens in 10^9 sequences: float64 arithmetic, no overflow, no zero weight."""
    counts = GlobalCounts(num_tokens=10**12, num_valid_seqs=10**9, num_seqs=10**9)
    expected = {
        "token-mean": 1e-12,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1e-9,
        "seq-mean-token-mean": 0.5e-9,
        "seq-mean-token-sum-norm": 1 / (1e9 * L),
    }[mode]
    found = token_weights(
        torch.ones(1, 2), mode, counts, loss_scale_factor=L, norm_semantics="seq-mean"
    )
    torch.testing.assert_close(found, torch.full((1, 2), expected), rtol=6e-8, atol=0)


def test_wrong_options_are_refused():
    """The checks of ModeSpec and of masks apply here too."""
    counts, mask = GlobalCounts(1, 1, 1), torch.ones(1, 1)
    with pytest.raises(ValueError, match="Unknown loss_agg_mode 'mean'"):
        token_weights(mask, "mean", counts)
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        token_weights(mask, "seq-mean-token-sum-norm", counts)
    with pytest.raises(ValueError, match="sequence_count='all' does not exist"):
        token_weights(mask, "token-mean", counts, sequence_count="all")
    with pytest.raises(ValueError, match=r"must have shape \[b, s\]"):
        token_weights(mask[0], "token-mean", counts)
    with pytest.raises(ValueError, match=r"sample_mask must have shape \[b\] = \[1\]"):
        token_weights(mask, "token-mean", counts, sample_mask=torch.ones(2))
