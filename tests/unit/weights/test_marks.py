"""The sign of a zero tells a valid token of weight 0 from a masked one, wherever weights travel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_process import REGIMES, make_aggregator, make_microbatch, run_step

from megatron_lossagg import GlobalCounts, token_weights, valid_tokens
from megatron_lossagg.modes import register_mode
from megatron_lossagg.modes.registry import _MODES

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
COUNTS = GlobalCounts(4, 2, 3)
FACTORS = {
    "zero-if-long": lambda n_s, c: (n_s < 3).double() / c.num_seqs,
    "all-zero": lambda n_s, c: 0 * n_s,
    "minus-zero": lambda n_s, c: -0.0 * n_s,
    "negative": lambda n_s, c: -n_s,
    "tiny": lambda n_s, c: 1e-60 * n_s,
    "infinite-without-tokens": lambda n_s, c: 1 / n_s,
}


@pytest.fixture(autouse=True)
def own_modes():
    """Registered for these tests alone."""
    before = dict(_MODES)
    for name, factor in FACTORS.items():
        register_mode(name, factor)
    yield
    _MODES.clear()
    _MODES.update(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("mode", FACTORS)
def test_valid_tokens_are_those_of_the_mask(mode, mask_dtype, dtype):
    """Whatever factors are: positive, negative, 0, too small for the dtype, inf without tokens."""
    weights = token_weights(MASK.to(mask_dtype), mode, COUNTS, weight_dtype=dtype)
    assert torch.equal(valid_tokens(weights), MASK > 0)
    masked = weights[MASK == 0]
    assert not torch.signbit(masked).any() and (masked == 0).all()


TRAVELS = {
    "slice": lambda w: w[:, 1:3],
    "transpose": lambda w: w.t(),
    "copy": lambda w: w.clone().contiguous(),
    "float64": lambda w: w.double(),
    "bfloat16": lambda w: w.bfloat16(),
    "half": lambda w: w.half(),
    "bytes": lambda w: w.contiguous().view(torch.uint8).clone().view(w.dtype),
    "index_select": lambda w: w.index_select(1, torch.tensor([3, 0])),
    "cat": lambda w: torch.cat([w, w], dim=1),
    "numpy": lambda w: torch.from_numpy(w.numpy().copy()),
}


@pytest.mark.parametrize("travel", TRAVELS)
def test_the_mark_survives(travel):
    """What broadcasts, slicers and casts do to a field of a batch."""
    weights = token_weights(MASK, "zero-if-long", COUNTS)
    moved, mask = TRAVELS[travel](weights), TRAVELS[travel](MASK.float())
    assert torch.equal(valid_tokens(moved), mask > 0)


def test_under_compile():
    """A compiled model reads the mask of multi-token prediction from the weights."""
    weights = token_weights(MASK, "zero-if-long", COUNTS)
    compiled = torch.compile(lambda w: valid_tokens(w).float() * 2, fullgraph=True)
    assert torch.equal(compiled(weights), 2 * MASK.float())


@pytest.mark.parametrize("mode", ["token-mean", "zero-if-long"])
def test_a_mask_that_holds_minus_zero(mode):
    """Its sign is not that of a valid token of weight 0."""
    mask = MASK.float() * torch.where(MASK > 0, 1.0, -1.0)
    assert torch.signbit(mask).any()
    assert torch.equal(valid_tokens(token_weights(mask, mode, COUNTS)), MASK > 0)


def test_weights_that_became_integers():
    """Their zeros have no sign."""
    with pytest.raises(TypeError, match="expects weights in floating point, got torch.int64"):
        valid_tokens(MASK)


@REGIMES
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mask_and_any_factors(per_token, data):
    """J, its gradient and n by loops, for factors of any sign, and with NaN at masked places."""
    rows = data.draw(st.integers(1, 4))
    mask = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=rows, max_size=rows)
    )
    factors = data.draw(st.lists(st.sampled_from([0.0, -0.0, 0.5, -2.0]), min_size=4, max_size=4))
    table = torch.tensor(factors, dtype=torch.float64)
    _MODES.pop("drawn", None)
    register_mode("drawn", lambda n_s, c: table[n_s.long()])
    losses = [[float(3 * r + t + 1) if m else float("nan") for t, m in enumerate(row)]
              for r, row in enumerate(mask)]  # fmt: skip
    microbatch = make_microbatch(losses, mask)
    step = make_aggregator("drawn", per_token=per_token).begin_step([microbatch])
    store = run_step(step)
    step.validate()
    expected = torch.tensor([[factors[sum(row)] * m for m in row] for row in mask]).double()
    value = sum(
        w * x for w_row, row in zip(expected.tolist(), losses, strict=True)
        for w, x in zip(w_row, row, strict=True) if w
    )  # fmt: skip
    assert step.report(store)["loss"] == pytest.approx(value)
    [planned] = step.microbatches
    num_tokens = sum(map(sum, mask))
    assert int(valid_tokens(planned["loss_weights"]).sum()) == num_tokens
    times = max(1, num_tokens) if per_token else 1
    torch.testing.assert_close(microbatch["losses"].grad, expected * times)
