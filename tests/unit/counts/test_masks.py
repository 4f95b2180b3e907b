"""Masks are read in bulk: the same counts as one by one, and no bad value is overlooked."""

from __future__ import annotations

import pytest
import torch

from megatron_lossagg.counts import masks as masks_module
from megatron_lossagg.counts.masks import count_rows

DTYPES = [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.int32, torch.uint16]


@pytest.mark.parametrize("max_values", [1, 7, 64, 2**20])
def test_rows_are_counted_as_one_by_one(max_values, monkeypatch):
    """Any widths, dtypes and order, also empty masks and strides, whatever is read together."""
    monkeypatch.setattr(masks_module, "_MAX_VALUES", max_values)
    monkeypatch.setattr(masks_module, "_KEPT", masks_module.threading.local())
    generator = torch.Generator().manual_seed(0)
    masks = []
    for index in range(60):
        shape = (index % 4, (5, 5, 5, 0, 33)[index // 4 % 5])
        values = torch.randint(2, shape, generator=generator)
        mask = values.to(DTYPES[index // 7 % len(DTYPES)])
        masks.append(mask.t().contiguous().t() if index % 2 else mask)
    before = [mask.clone() for mask in masks]
    found, num_bad = count_rows(masks)
    expected = [sum(row) for mask in masks for row in mask.long().tolist()]
    assert found.tolist() == expected and found.dtype == torch.int64 and num_bad == 0
    assert all(torch.equal(a, b) for a, b in zip(masks, before, strict=True))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.5, torch.float32),
        (1 - 2**-24, torch.float32),
        (1e-30, torch.float32),
        (-1.0, torch.float32),
        (float("nan"), torch.float32),
        (float("inf"), torch.float32),
        (1 + 2**-52, torch.float64),
        (1e-300, torch.float64),
        (0.5, torch.bfloat16),
        (16, torch.int8),
        (-128, torch.int8),
        (255, torch.uint8),
        (2**16 - 1, torch.uint16),
        (2**24 + 1, torch.int32),
        (-(2**31), torch.int32),
        (2, torch.uint16),
        (2**32 - 1, torch.uint32),
        (2, torch.int64),
        (2**32, torch.int64),
        (2**32 + 1, torch.int64),
        (-1, torch.int64),
        (-(2**63), torch.int64),
    ],
)
@pytest.mark.parametrize("layout", ["small", "large", "large, transposed"])
def test_one_bad_value_among_many(value, dtype, layout):
    """Also one next to 0 or 1, one whose square wraps around, and one in the last of ten masks."""
    masks = [torch.ones(2, 50 if layout == "small" else 4096, dtype=dtype) for _ in range(10)]
    masks[-1][1, 7] = value
    if layout == "large, transposed":
        masks = [mask.t().contiguous().t() for mask in masks]
    with pytest.raises(ValueError, match="may hold only 0 and 1, got 1 other values such as"):
        count_rows(masks)


def test_a_mask_that_was_made_in_inference_mode(monkeypatch):
    """What is kept between calls can be used inside and outside of that mode."""
    monkeypatch.setattr(masks_module, "_KEPT", masks_module.threading.local())
    with torch.inference_mode():
        inside = count_rows([torch.ones(2, 3)])[0].tolist()
    assert inside == count_rows([torch.ones(2, 3)])[0].tolist() == [3, 3]
