"""Modes: names, options and the checksum that each mode promises."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_lossagg import GlobalCounts, token_weights
from megatron_lossagg.modes import ModeSpec, get_mode, mode_names, undivided_counts

NORM = "seq-mean-token-sum-norm"


def test_known_modes():
    """The canonical names are verl's, and each finds its mode."""
    names = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM)
    units = ("unit-mean-token-sum", "unit-mean-token-mean", "unit-mean-seq-mean-token-mean")
    assert mode_names() == (*names, *units)
    assert [get_mode(name).name for name in names] == list(names)


@pytest.mark.parametrize("unknown", ["token_mean", "", None, 3, ["token-mean"], {"a": 1}])
def test_unknown_mode_names_the_known_ones(unknown):
    """Whatever is passed, the message repeats it and lists every mode."""
    with pytest.raises(ValueError, match="Unknown loss_agg_mode") as caught:
        ModeSpec(unknown)
    assert repr(unknown) in str(caught.value)
    assert all(name in str(caught.value) for name in mode_names())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ModeSpec("token-mean"), 1),
        (ModeSpec("token-sum"), 21),
        (ModeSpec("seq-mean-token-sum"), Fraction(21, 5)),
        (ModeSpec("seq-mean-token-sum", sequence_count="nominal"), 3),
        (ModeSpec("seq-mean-token-mean"), 1),
        (ModeSpec("seq-mean-token-mean", sequence_count="nominal"), Fraction(5, 7)),
        (ModeSpec(NORM, loss_scale_factor=8), Fraction(21, 8)),
        (ModeSpec(NORM, loss_scale_factor=8, norm_semantics="seq-mean"), Fraction(21, 40)),
        (
            ModeSpec(
                NORM, loss_scale_factor=8, norm_semantics="seq-mean", sequence_count="nominal"
            ),
            Fraction(3, 8),
        ),
    ],
)
def test_checksum_is_that_of_the_table(spec, expected):
    """T=21, 5 valid of 7 rows: the sum of all weights is what the table says, in float64."""
    checksum = spec.checksum(GlobalCounts(num_tokens=21, num_valid_seqs=5, num_seqs=7))
    assert checksum.dtype == torch.float64 and checksum.shape == ()
    assert checksum.item() == pytest.approx(float(expected), rel=1e-15)


@pytest.mark.parametrize(
    ("mode", "valid", "nominal"),
    [
        ("unit-mean-token-sum", 7 / 2, 7 / 3),
        ("unit-mean-token-mean", 1, 2 / 3),
        ("unit-mean-seq-mean-token-mean", 1, 2 / 3),
    ],
)
def test_units_are_counted_as_sequences_are(mode, valid, nominal):
    """3 units, one without a valid token: U is 2 or 3, and the weights add up to the checksum."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    of_units = torch.tensor([4, 3, 0]), torch.tensor([2, 1, 0])
    counts = GlobalCounts(7, 3, 4, *of_units)
    options = {"unit_ids": torch.tensor([0, 0, 2, 1]), "weight_dtype": torch.float64}
    for sequence_count, expected in (("valid", valid), ("nominal", nominal)):
        spec = ModeSpec(mode, sequence_count=sequence_count)
        weights = token_weights(mask, mode, counts, sequence_count=sequence_count, **options)
        assert spec.checksum(counts).item() == pytest.approx(expected, rel=1e-15)
        assert weights.sum().item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("num_seqs", [0, 3])
@pytest.mark.parametrize("sequence_count", ["valid", "nominal"])
@pytest.mark.parametrize("mode", mode_names())
@pytest.mark.parametrize("norm_semantics", ["sum", "seq-mean"])
def test_no_valid_token_means_checksum_zero(mode, norm_semantics, sequence_count, num_seqs):
    """T = 0 gives exactly 0 in every mode, never NaN."""
    spec = ModeSpec(
        mode, loss_scale_factor=4, norm_semantics=norm_semantics, sequence_count=sequence_count
    )
    no_units = torch.zeros(2, 3, dtype=torch.int64).unbind()
    assert spec.checksum(GlobalCounts(0, 0, num_seqs, *no_units)).item() == 0.0


@pytest.mark.parametrize("bad", [0, -1, 0.0, math.nan, math.inf, -math.inf, 1e300, 10**400, 1e-300])
def test_loss_scale_factor_that_cannot_divide(bad):
    """0, negative, not finite, or so extreme that a float32 weight would be 0 or inf."""
    with pytest.raises(ValueError, match=r"cannot divide a loss; pass a finite number > 0"):
        ModeSpec(NORM, loss_scale_factor=bad)


@pytest.mark.parametrize("bad", [True, "4", [4], torch.tensor(4)])
def test_loss_scale_factor_that_is_no_number(bad):
    """The message shows the value and its type, so that a YAML `1e3` (a string) is found."""
    with pytest.raises(TypeError, match="loss_scale_factor must be a number, got") as caught:
        ModeSpec(NORM, loss_scale_factor=bad)
    assert repr(bad) in str(caught.value) and type(bad).__name__ in str(caught.value)


def test_equal_factors_make_equal_specs():
    """4, 4.0 and numpy's 4 are one configuration: ranks compare specs by their text."""
    specs = [
        ModeSpec(NORM, loss_scale_factor=kind(4)) for kind in (int, float, np.int64, np.float32)
    ]
    assert len({repr(spec) for spec in specs}) == 1
    assert repr(specs[0]) != repr(ModeSpec(NORM, loss_scale_factor=5))


def test_loss_scale_factor_is_required_where_it_divides():
    """Public report 8: with L unset the norm mode raises rather than guess; others ignore it."""
    with pytest.raises(ValueError, match="needs loss_scale_factor, .* maximum response length"):
        ModeSpec(NORM)
    assert ModeSpec("token-mean").loss_scale_factor is None


def test_unknown_options_name_the_known_ones():
    """Semantics and sequence counts that do not exist."""
    with pytest.raises(ValueError, match=r"norm_semantics='mean' .* 'sum' .* or 'seq-mean'"):
        ModeSpec("token-mean", norm_semantics="mean")
    with pytest.raises(ValueError, match="sequence_count='rows' .* expected 'valid' or 'nominal'"):
        ModeSpec("token-mean", sequence_count="rows")


@pytest.mark.parametrize("sequence_count", ["valid", "nominal"])
@pytest.mark.parametrize("mode", mode_names())
@pytest.mark.parametrize("norm_semantics", ["sum", "seq-mean"])
def test_divisor_is_all_that_the_global_batch_adds(mode, norm_semantics, sequence_count):
    """Weights from counts of 1, over the divisor, are the weights; None in modes with units."""
    spec = ModeSpec(
        mode, loss_scale_factor=8, norm_semantics=norm_semantics, sequence_count=sequence_count
    )
    counts = GlobalCounts(num_tokens=21, num_valid_seqs=5, num_seqs=7)
    divisor = spec.divisor(counts) if not spec.needs_units else get_mode(mode).divisor
    if spec.needs_units:
        assert divisor is None
        return
    n_s = torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64)
    factor, device = get_mode(mode).sequence_factor, torch.device("cpu")
    weights = factor(n_s, spec.inputs(counts, device)).expand(3)
    undivided = factor(n_s, spec.inputs(undivided_counts(), device)).expand(3)
    torch.testing.assert_close(undivided / divisor, weights, rtol=1e-15, atol=0)
