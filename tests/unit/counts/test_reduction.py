"""GlobalCounts and count_global_batch in one process: exact integers, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_lossagg import GlobalCounts, ParallelGroups, count_global_batch
from megatron_lossagg.counts import VECTOR_LENGTH, count_local
from megatron_lossagg.counts.sequences import Sequences

ALONE = ParallelGroups.single_process()


def as_ints(counts):
    return int(counts.num_tokens), int(counts.num_valid_seqs), int(counts.num_seqs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_counts_of_ragged_microbatches(dtype):
    """Tokens, valid rows and rows over microbatches of different shapes, for any mask dtype."""
    masks = [
        torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=dtype),
        torch.tensor([[1, 1], [0, 0], [0, 1]], dtype=dtype),
        torch.zeros(0, 3, dtype=dtype),
        torch.zeros(2, 0, dtype=dtype),
    ]
    counts = count_global_batch(masks, ALONE)
    assert as_ints(counts) == (8, 4, 7)
    assert all(
        c.dtype == torch.int64 and c.shape == () for c in vars(counts).values() if c is not None
    )


def test_long_bfloat16_mask_is_counted_exactly():
    """70001 ones: a sum in bfloat16 would stop at 256."""
    assert as_ints(count_global_batch([torch.ones(1, 70001, dtype=torch.bfloat16)], ALONE)) == (
        70001,
        1,
        1,
    )


@pytest.mark.parametrize("sample_dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_rows_count_nowhere(sample_dtype):
    """Public report 9: a row marked by sample_mask is no token, no sequence and no nominal row."""
    masks = [torch.ones(2, 2), torch.tensor([[1, 1], [0, 0]]), torch.ones(1, 2)]
    sample_masks = [
        torch.tensor([1, 0], dtype=sample_dtype),
        torch.tensor([1, 1], dtype=sample_dtype),
        None,
    ]
    counts = count_global_batch(masks, ALONE, sample_masks=sample_masks)
    assert as_ints(counts) == (6, 3, 4)


@pytest.mark.parametrize("num_microbatches", [1, 2, 200])
def test_vector_length_is_constant(num_microbatches):
    """What is reduced has 32 entries whatever the number and shape of microbatches."""
    local = count_local(
        [Sequences.of_fields([(torch.ones(3, 5), None, None, None)] * num_microbatches)]
    )
    assert VECTOR_LENGTH == 32
    assert local.vector.shape == (32,) and local.vector.dtype == torch.int64


@pytest.mark.parametrize("count", [2**31, 3 * 2**30, 10**12])
def test_counts_beyond_int32(count):
    """Public report 25: large counts stay what they are, from ints and from tensors."""
    assert as_ints(GlobalCounts(count, count, count)) == (count,) * 3
    tensors = GlobalCounts(torch.tensor(count), torch.tensor([count]), np.int64(count))
    assert as_ints(tensors) == (count,) * 3
    assert GlobalCounts(torch.tensor(7, dtype=torch.int32), 1, 1).num_tokens.dtype == torch.int64


@pytest.mark.parametrize(
    "bad", [7.0, True, "7", None, np.float64(7), torch.tensor(7.0), torch.tensor(True)]
)
def test_counts_that_are_no_integers(bad):
    """Floats and bools are refused by name: a count is exact."""
    with pytest.raises(TypeError, match=r"GlobalCounts\.num_valid_seqs must be an int.*ounts are"):
        GlobalCounts(num_tokens=7, num_valid_seqs=bad, num_seqs=7)


@pytest.mark.parametrize("bad", [-1, np.int64(-1), torch.tensor(-1)])
def test_negative_counts(bad):
    """The field and the value are named."""
    with pytest.raises(ValueError, match=r"GlobalCounts\.num_seqs must be >= 0, got -1"):
        GlobalCounts(num_tokens=0, num_valid_seqs=0, num_seqs=bad)


def test_count_that_is_a_vector():
    """A per-microbatch vector is not a global count."""
    with pytest.raises(ValueError, match=r"num_tokens must be one number, got shape \(2,\)"):
        GlobalCounts(torch.tensor([1, 2]), 1, 1)


@pytest.mark.parametrize("bad", [2, -1, 0.5, float("nan"), float("inf")])
def test_mask_values_other_than_0_and_1(bad):
    """A weight in the mask is refused, with the value and where weights belong."""
    mask = torch.tensor([[1, 1, 0], [0, bad, bad]])
    with pytest.raises(ValueError, match=r"only 0 and 1, got 2 other values .* into the loss"):
        count_global_batch([mask], ALONE)


@pytest.mark.parametrize("shape", [(4,), (1, 2, 4), ()])
def test_mask_of_another_shape(shape):
    """One row per sequence: [b, s]."""
    with pytest.raises(ValueError, match=r"must have shape \[b, s\], .* got \(") as caught:
        count_global_batch([torch.ones(shape)], ALONE)
    assert str(tuple(shape)) in str(caught.value)


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_sample_mask_of_another_shape(shape):
    """One entry per row."""
    with pytest.raises(ValueError, match=r"sample_mask must have shape \[b\] = \[2\], got"):
        Sequences.of(torch.ones(2, 4), torch.ones(shape))


@pytest.mark.parametrize("bad", [[[1, 0]], np.ones((1, 2))])
def test_masks_that_are_no_tensors(bad):
    """Lists and arrays are named as such, not by a missing attribute."""
    with pytest.raises(TypeError, match="loss_mask must be a tensor, got"):
        Sequences.of(bad)
    with pytest.raises(TypeError, match="sample_mask must be a tensor, got"):
        Sequences.of(torch.ones(1, 2), bad)


@pytest.mark.parametrize("bad", [[], (), torch.ones(2, 3), None, (m for m in [torch.ones(1, 1)])])
def test_masks_that_are_no_list(bad):
    """An empty list, one stacked tensor or a generator: the message says what came."""
    with pytest.raises(ValueError, match="non-empty list of loss masks .* got: ") as caught:
        count_global_batch(bad, ALONE)
    assert type(bad).__name__ in str(caught.value)


def test_as_many_sample_masks_as_masks():
    """A list of another length is not cut silently."""
    with pytest.raises(ValueError, match="Got 1 sample_masks for 2 loss masks"):
        count_global_batch([torch.ones(1, 1)] * 2, ALONE, sample_masks=[None])


def test_counting_changes_and_keeps_nothing():
    """Masks are read once and not written; a mask that requires grad is no part of a graph."""
    mask = torch.tensor([[1.0, 0.0]], requires_grad=True)
    before = mask.detach().clone()
    counts = count_global_batch([mask], ALONE)
    assert torch.equal(mask, before) and not counts.num_tokens.requires_grad
