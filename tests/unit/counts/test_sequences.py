"""Packed sequences and units in one process, against plain loops."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron_lossagg import GlobalCounts, ParallelGroups, count_global_batch, token_weights
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.testing.reference import reference_loss

ALONE = ParallelGroups.single_process()
MODES = [
    ("token-mean", {}),
    ("token-sum", {}),
    ("seq-mean-token-sum", {}),
    ("seq-mean-token-mean", {}),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 3.0, "norm_semantics": "seq-mean"}),
    ("unit-mean-token-mean", {}),
    ("unit-mean-seq-mean-token-mean", {}),
    ("length-power-0.5", {}),
]


@st.composite
def packed_rows(draw):
    """(masks of the sequences, padding behind each, units, padding at the end)."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6))
    padding = [draw(st.integers(0, 3)) if mask else 0 for mask in masks]
    units = [draw(st.integers(0, 2)) for _ in masks]
    return masks, padding, units, draw(st.integers(0, 2))


@given(packed_rows(), st.booleans(), st.sampled_from(["valid", "nominal"]))
def test_a_packed_row_weighs_its_sequences_as_rows(data, padded, sequence_count):
    """Any lengths (also 0 and 1), padding and units: J is that of the same sequences as rows."""
    masks, padding, units, tail = data
    padding = padding if padded else [0] * len(masks)
    row = [m for mask, pad in zip(masks, padding, strict=True) for m in [*mask, *[0] * pad]]
    row += [0] * tail
    lengths = torch.tensor([0, *(len(mask) for mask in masks)])
    padded_lengths = lengths + torch.tensor([0, *padding])
    loss_mask = torch.tensor([row], dtype=torch.int64)
    fields = {"cu_seqlens": lengths.cumsum(0).int()}
    if padded:
        fields["cu_seqlens_padded"] = padded_lengths.cumsum(0).int()[None]
    losses = torch.arange(1.0, len(row) + 1, dtype=torch.float64)[None]
    unit_ids = torch.tensor(units)
    counts = count_global_batch(
        [loss_mask],
        ALONE,
        **{name: [value] for name, value in fields.items()},
        unit_ids=[unit_ids],
        num_units=3,
    )
    # The same as padded rows, without the sequences of length 0, which are not there.
    width = max(1, *(len(mask) for mask in masks))
    starts = padded_lengths.cumsum(0)
    there = [i for i, mask in enumerate(masks) if mask]
    rows, row_losses = torch.zeros(len(there), width), torch.zeros(len(there), width).double()
    for place, i in enumerate(there):
        rows[place, : len(masks[i])] = torch.tensor(masks[i], dtype=torch.float32)
        row_losses[place, : len(masks[i])] = losses[0, starts[i] : starts[i] + len(masks[i])]
    for mode, options in MODES:
        weights = token_weights(
            loss_mask,
            mode,
            counts,
            sequence_count=sequence_count,
            unit_ids=unit_ids if mode.startswith("unit") else None,
            weight_dtype=torch.float64,
            **fields,
            **options,
        )
        expected = reference_loss(
            row_losses,
            rows,
            mode,
            sequence_count=sequence_count,
            unit_ids=unit_ids[there],
            num_units=3,
            **options,
        )
        assert weights.shape == loss_mask.shape
        assert (weights * losses).sum().item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([0, 2], TypeError, "cu_seqlens must be a tensor"),
        (torch.tensor([0.0, 4.0]), TypeError, "must hold integers, got torch.float32"),
        (torch.tensor([0]), ValueError, r"shape \[num_seqs \+ 1\]"),
        (torch.tensor([[0, 2], [2, 4]]), ValueError, r"shape \[num_seqs \+ 1\]"),
        (torch.tensor([0, 5]), ValueError, "at most the mask's width 4"),
        (torch.tensor([0, 3, 2, 4]), ValueError, "must rise from 0"),
        (torch.tensor([1, 4]), ValueError, "must rise from 0"),
        (torch.tensor([0, 2]), ValueError, "1 at 2 tokens outside every sequence"),
    ],
)
def test_boundaries_that_cannot_be_right(cu_seqlens, error, message):
    """Each refusal says what was passed and what was expected."""
    with pytest.raises(error, match=message):
        Sequences.of(torch.ones(1, 4), cu_seqlens=cu_seqlens)


def test_other_shapes_that_cannot_be_packed():
    """Several rows, boundaries of padding alone, two descriptions that differ."""
    with pytest.raises(ValueError, match=r"must have shape \[1, t\], got \(2, 4\)"):
        Sequences.of(torch.ones(2, 4), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="cu_seqlens_padded needs cu_seqlens"):
        Sequences.of(torch.ones(1, 4), cu_seqlens_padded=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="2 entries and cu_seqlens_padded 3"):
        Sequences.of(
            torch.ones(1, 4),
            cu_seqlens=torch.tensor([0, 4]),
            cu_seqlens_padded=torch.tensor([0, 2, 4]),
        )


@pytest.mark.parametrize(
    ("unit_ids", "num_units", "error", "message"),
    [
        (torch.tensor([0, 3]), 3, ValueError, r"0\.\.2 \(num_units=3\), got values from 0 to 3"),
        (torch.tensor([-1, 0]), 3, ValueError, "got values from -1 to 0"),
        (torch.tensor([0.0, 1.0]), 3, TypeError, "must hold integers"),
        ([0, 1], 3, TypeError, "must be a tensor"),
        (torch.tensor([0]), 3, ValueError, r"one entry per sequence, \[2\], got \(1,\)"),
        (
            torch.tensor([0, 1]),
            None,
            ValueError,
            "num_units must be an int .* got None",
        ),
        (torch.tensor([0, 1]), 0, ValueError, "num_units must be an int of at least 1, got 0"),
    ],
)
def test_units_that_cannot_be_right(unit_ids, num_units, error, message):
    """Ids are dense over the global batch, one per sequence."""
    with pytest.raises(error, match=message):
        count_global_batch([torch.ones(2, 2)], ALONE, unit_ids=[unit_ids], num_units=num_units)


def test_a_unit_mode_needs_counts_of_units():
    """Counts without units cannot serve a unit mode, and the message says what is missing."""
    with pytest.raises(ValueError, match="needs unit_ids .* and counts with units"):
        token_weights(
            torch.ones(1, 2), "unit-mean-token-mean", GlobalCounts(2, 1, 1), unit_ids=torch.zeros(1)
        )
