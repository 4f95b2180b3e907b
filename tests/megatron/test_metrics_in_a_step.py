"""Property: a reported metric is that of the whole batch in float64, and over nothing it is NaN."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from objectives import LAYOUTS, PLANNINGS, assert_planned, batch_f, run_planned
from prescribed import batch_of, even, prescribed_losses

from megatron_lossagg import LossTerm
from megatron_lossagg.testing import RankFailure

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
ALL_PLANNINGS = pytest.mark.parametrize("planning", PLANNINGS)
ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)
EMPTY = [[0] * 4] * 4


def per_token_values(output, microbatch):
    losses = prescribed_losses(output, microbatch)
    values = microbatch["losses"]
    return losses, {
        "one": torch.ones_like(values),
        "flag": values < 5,
        "count": values.long(),
        "sum": values,
        "per_sequence": values,
        "lowest": values,
        "highest": values,
        "any": values > 5,
    }


PER_TOKEN = {
    "one": "tokens",
    "flag": "tokens",
    "count": "tokens",
    "sum": "sum",
    "per_sequence": "sequences",
    "lowest": "min",
    "highest": "max",
    "any": "max",
}
# Of losses 1 2 3 4 | 6 | 2 2.
PER_TOKEN_VALUES = {
    "one": 1.0,
    "flag": 6 / 7,
    "count": 20 / 7,
    "sum": 20.0,
    "per_sequence": 20 / 3,
    "lowest": 1.0,
    "highest": 6.0,
    "any": 1.0,
}


def with_per_token(mode, dtype=torch.float32):
    return {
        "terms": [LossTerm("term", per_token_values, mode, metrics=PER_TOKEN)],
        "weight_dtype": dtype,
    }


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_values_of_tokens(rank_pool, mode, layout, planning, per_token):
    """With the default weights of float32: exact, not to 6e-8; numbers and bools."""
    make = partial(with_per_token, mode)
    _, reports = run_planned(rank_pool, batch_f(layout), layout, make, planning, per_token)
    for report in reports:
        assert {name: report[name] for name in PER_TOKEN_VALUES} == PER_TOKEN_VALUES


def rewards(kind, output, microbatch):
    losses = prescribed_losses(output, microbatch)
    reward = microbatch["reward"]
    return losses, {"reward": reward.bool() if kind == "bool" else reward.to(kind)}


def with_rewards(kind, sequence_count, normaliser="sequences"):
    metrics = {"reward": normaliser}
    term = LossTerm(
        "term",
        partial(rewards, kind),
        "token-mean",
        sequence_count=sequence_count,
        metrics=metrics,
    )
    return {"terms": [term], "weight_dtype": torch.float32}


@BOTH_REGIMES
@ALL_PLANNINGS
@pytest.mark.parametrize("layout", ["D=2 M=2", "PP=2 M=4"])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, "bool"], ids=str)
@pytest.mark.parametrize(("sequence_count", "expected"), [("valid", 2 / 3), ("nominal", 0.5)])
def test_values_of_sequences(
    rank_pool, sequence_count, expected, kind, layout, planning, per_token
):
    """verl#1508: rewards 1, 0, 1 of sequences of 4, 1, 2 tokens, and of a masked one."""
    batch = batch_f(layout, reward=[1, 0, 1, 0])
    make = partial(with_rewards, kind, sequence_count)
    _, reports = run_planned(rank_pool, batch, layout, make, planning, per_token)
    assert [report["reward"] for report in reports] == [expected] * len(reports)
    for normaliser, expected_value in (("sum", 2.0), ("max", 1.0), ("min", 0.0)):
        make = partial(with_rewards, kind, sequence_count, normaliser)
        _, reports = run_planned(rank_pool, batch, layout, make, planning, per_token)
        assert [report["reward"] for report in reports] == [expected_value] * len(reports)


def mean_of_rewards(output, microbatch):
    return prescribed_losses(output, microbatch), {"reward": microbatch["losses"].mean(dim=1)}


def rewards_of_chunks():
    return {
        "loss_fn": mean_of_rewards,
        "loss_agg_mode": "token-mean",
        "metrics": {"reward": "sequences"},
    }


def rewards_over_tokens():
    return {**rewards_of_chunks(), "metrics": {"reward": "tokens"}}


def test_a_value_per_row_needs_whole_rows(rank_pool):
    """A chunk of a row would count a sequence on every context-parallel rank."""
    with pytest.raises(RankFailure, match="metric 'reward' has one value per row, .*per token"):
        run_planned(rank_pool, batch_f("C=2 M=2"), "C=2 M=2", rewards_of_chunks, "wrap", False)
    with pytest.raises(RankFailure, match="declared as 'tokens', a mean over tokens"):
        run_planned(rank_pool, batch_f("D=2 M=2"), "D=2 M=2", rewards_over_tokens, "wrap", False)


def moments(output, microbatch):
    returns, values = microbatch["returns"], microbatch["values"]
    error = returns - values
    return prescribed_losses(output, microbatch), {
        "r": returns,
        "r2": returns.square(),
        "e": error,
        "e2": error.square(),
    }


def with_moments():
    return {
        "loss_fn": moments,
        "loss_agg_mode": "seq-mean-token-mean",
        "metrics": dict.fromkeys(("r", "r2", "e", "e2"), "tokens"),
        "weight_dtype": torch.float32,
    }


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
def test_explained_variance(rank_pool, layout, planning, per_token):
    """RLinf#1247: 11 returns near 1000 with spread 1, from moments summed over the batch."""
    generator = torch.Generator().manual_seed(5)
    returns = 1000 + torch.randn(4, 4, generator=generator, dtype=torch.float64)
    values = returns + 0.35 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    counted = mask > 0
    error = (returns - values)[counted]
    expected = 1 - error.var(unbiased=False) / returns[counted].var(unbiased=False)
    from megatron_lossagg.testing import Layout

    parsed = Layout.parse(layout)
    batch = batch_of(
        returns.tolist(),
        mask.tolist(),
        even(4, parsed.dp, parsed.num_microbatches),
        returns=returns.tolist(),
        values=values.tolist(),
    )
    rows = {**batch.rows, "returns": returns, "values": values}
    batch = type(batch)(rows, batch.assignment)
    _, reports = run_planned(rank_pool, batch, layout, with_moments, planning, per_token)
    for found in reports:
        variance = found["r2"] - found["r"] ** 2
        explained = 1 - (found["e2"] - found["e"] ** 2) / variance
        assert abs(explained - expected.item()) < 1e-8


def bad_values(value, output, microbatch):
    """One bad value at a valid token of the last sequence that has any."""
    values = torch.where(microbatch["is_bad"] > 0, value, microbatch["losses"])
    return prescribed_losses(output, microbatch), dict.fromkeys(("low", "high", "mean"), values)


def with_bad_values(value):
    metrics = {"low": "min", "high": "max", "mean": "tokens"}
    loss_fn = partial(bad_values, value)
    return {"loss_fn": loss_fn, "loss_agg_mode": "token-mean", "metrics": metrics}


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, {"low": math.nan, "high": math.nan, "mean": math.nan}),
        (math.inf, {"high": math.inf, "mean": math.inf}),
        (-math.inf, {"low": -math.inf, "mean": -math.inf}),
    ],
)
def test_a_bad_value_shows_on_whatever_rank_it_is(
    rank_pool, value, expected, row, layout, planning, per_token
):
    """NaN is the minimum and the maximum, as it is the mean; infinity is a number among others."""
    is_bad = [[int(r == row and t == 1) for t in range(4)] for r in range(4)]
    batch = batch_f(layout, is_bad=is_bad)
    make = partial(with_bad_values, value)
    _, reports = run_planned(rank_pool, batch, layout, make, planning, per_token)
    for report in reports:
        for name, number in expected.items():
            assert report[name] == pytest.approx(number, nan_ok=True), (name, report)


def of_nothing():
    """A term that trains, one that only reports, and metrics of every kind."""
    watched = LossTerm("watched", prescribed_losses, "token-mean", 0.0)
    return {
        "terms": [
            LossTerm("term", per_token_values, "seq-mean-token-sum", metrics=PER_TOKEN),
            watched,
        ]
    }


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
def test_a_batch_without_a_token(rank_pool, layout, planning, per_token):
    """The loss and its terms are 0, metrics and what only reports are NaN, in both settings."""
    batch = batch_f(layout, loss_mask=EMPTY)
    gradients, reports = run_planned(rank_pool, batch, layout, of_nothing, planning, per_token)
    assert set(gradients.values()) == {0.0}
    for report in reports:
        assert report.pop("is_empty") is True
        assert report.pop("loss") == 0.0 and report.pop("term") == 0.0
        assert set(report) == {"watched", *PER_TOKEN}
        assert all(math.isnan(value) for value in report.values())


def policy_and_value():
    return {
        "terms": [
            LossTerm("policy", prescribed_losses, "token-mean"),
            LossTerm("value", prescribed_losses, "token-mean", mask_key="value_mask"),
            LossTerm("watched", prescribed_losses, "token-mean", 0.0, mask_key="other_mask"),
        ]
    }


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
def test_a_step_is_empty_if_no_term_that_trains_has_a_token(rank_pool, layout, planning, per_token):
    """prime-rl#3222: policy filtered away, value losses 1 and 2: J = 1.5, not empty."""
    value_mask = [[1, 1, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    masks = {"loss_mask": EMPTY, "value_mask": value_mask, "other_mask": value_mask}
    batch = batch_f(layout, **masks)
    entries = {"policy": 0.0, "value": 1.5, "watched": 1.5, "is_empty": False}
    assert_planned(rank_pool, batch, layout, policy_and_value, planning, per_token, 1.5, **entries)
    # What only reports does not train.
    batch = batch_f(layout, **{**masks, "value_mask": EMPTY})
    assert_planned(
        rank_pool, batch, layout, policy_and_value, planning, per_token, 0.0, is_empty=True
    )


def loss_per_source():
    watched = [
        LossTerm(f"source_{i}", prescribed_losses, "token-mean", 0.0, mask_key=f"source_{i}")
        for i in range(3)
    ]
    return {"terms": [LossTerm("policy", prescribed_losses, "token-mean"), *watched]}


@BOTH_REGIMES
@ALL_PLANNINGS
def test_a_loss_per_data_source(rank_pool, planning, per_token):
    """ms-swift#3686: a source that is absent from the batch reads NaN, never 0."""
    masks = {
        "source_0": [[1, 0, 0, 0], EMPTY[0], EMPTY[0], EMPTY[0]],
        "source_1": [EMPTY[0], [1, 0, 0, 0], [1, 1, 0, 0], EMPTY[0]],
        "source_2": EMPTY,
    }
    batch = batch_f("D=2 M=2", **masks)
    _, reports = run_planned(rank_pool, batch, "D=2 M=2", loss_per_source, planning, per_token)
    for report in reports:
        assert report["source_0"] == pytest.approx(1.0, rel=1e-15)
        assert report["source_1"] == pytest.approx(10 / 3, rel=1e-15)
        assert math.isnan(report["source_2"])
