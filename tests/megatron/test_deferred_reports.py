"""Property: deferred denominators divide their own step alone, and its report is that of J."""

from __future__ import annotations

import math

import pytest
import torch
from prescribed import batch_of, prescribed_losses
from rank_runs import assert_gradient, on_ranks

from megatron_lossagg import LossAggError, LossTerm
from megatron_lossagg.testing import Layout

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
# Row 0: 4 tokens of mean 2; row 1: 36 tokens of mean 0.5.
LOSSES = [[1.0, 2.0, 3.0, 2.0] + [9.0] * 32, [0.25, 0.75] * 18]
MASK = [[1] * 4 + [0] * 32, [1] * 36]
OTHER_MASK = [[1, 1] + [0] * 34, [0] * 36]
# mode, options, J
MODES = [
    ("token-mean", {}, 26 / 40),
    ("token-sum", {}, 26.0),
    ("seq-mean-token-sum", {}, 13.0),
    ("seq-mean-token-mean", {}, 1.25),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 8}, 26 / 8),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 8, "norm_semantics": "seq-mean"}, 13 / 8),
    ("length-power-0.5", {}, (8 / 2 + 18 / 6) / 2),
]
LAYOUTS = ("D=1 M=2", "D=2 M=1", "PP=2 M=2")


def batch(layout, **masks):
    parsed = Layout.parse(layout)
    rows = iter(range(2))
    assignment = tuple(
        tuple((next(rows),) for _ in range(parsed.num_microbatches)) for _ in range(parsed.dp)
    )
    return batch_of(LOSSES, masks.pop("loss_mask", MASK), assignment, **masks)


def with_metrics(output, microbatch):
    values = microbatch["losses"]
    return prescribed_losses(output, microbatch), {"one": torch.ones_like(values), "top": values}


METRICS = {"one": "tokens", "top": "max"}


def deferred(rank, mode, options, **further):
    return rank.aggregator(
        with_metrics,
        loss_agg_mode=mode,
        metrics=METRICS,
        denominators="deferred",
        report_counts=True,
        **options,
        **further,
    )


def run(rank, aggregator, *, everywhere=False):
    """A step; nothing is wrapped where no loss is computed, unless `everywhere`."""
    data = rank.stream(1)
    if rank.is_last_stage or everywhere:
        data = aggregator.wrap(data, num_microbatches=rank.layout.num_microbatches)
    store, gradient = rank.run(aggregator.loss_func, data)
    return gradient, aggregator.report(store), aggregator.is_empty


def _every_mode(rank, key, returns):
    return [
        run(rank, deferred(rank, mode, options, weights_key=key, returns=returns))
        for mode, options, _ in MODES
    ]


@pytest.mark.parametrize("regime", ["R1", "R2", "R3", "R4"])
@pytest.mark.parametrize("key", ["loss_weights", "loss_mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_and_report_of_every_mode(rank_pool, layout, key, regime):
    """trl#7206: as gradient and from `report`, on every rank; with counts and metrics."""
    per_token = regime in ("R3", "R4")
    returns = "loss" if regime in ("R1", "R4") else "loss_and_num_tokens"
    results = on_ranks(rank_pool, _every_mode, layout, per_token, key, returns, batch=batch(layout))
    for found in results:
        for (mode, _, expected), (gradient, report, is_empty) in zip(MODES, found, strict=True):
            assert_gradient([gradient], expected, per_token)
            assert report["loss"] == pytest.approx(expected, rel=1e-12), mode
            assert (report["one"], report["top"]) == (1.0, 3.0) and not is_empty
            assert (report["num_tokens"], report["num_seqs"]) == (40, 2)
            assert report["masked_fraction"] == pytest.approx(32 / 72)


def _wrapped_on_every_stage(rank):
    found = []
    for mode, options, _ in MODES:
        found.append(run(rank, deferred(rank, mode, options), everywhere=True))
    return found


@BOTH_REGIMES
def test_stages_that_have_data_of_their_own(rank_pool, per_token):
    """An earlier stage counts nothing, and reads the report of the last one."""
    results = on_ranks(
        rank_pool, _wrapped_on_every_stage, "PP=2 M=2", per_token, batch=batch("PP=2 M=2")
    )
    for found in results:
        for (_, _, expected), (gradient, report, is_empty) in zip(MODES, found, strict=True):
            assert_gradient([gradient], expected, per_token)
            assert report["loss"] == pytest.approx(expected, rel=1e-12) and not is_empty


def _host_pairs(rank, mode):
    """What a host that sums pairs by itself makes of the reports."""
    metrics = {"one": "tokens", "sum": "sum", "per_sequence": "sequences"}

    def loss_fn(output, microbatch):
        values = microbatch["losses"]
        return prescribed_losses(output, microbatch), {
            "one": torch.ones_like(values),
            "sum": values,
            "per_sequence": values,
        }

    aggregator = rank.aggregator(
        loss_fn, loss_agg_mode=mode, metrics=metrics, denominators="deferred"
    )
    data = aggregator.wrap(rank.stream(1), num_microbatches=rank.layout.num_microbatches)
    store, _ = rank.run(aggregator.loss_func, data)
    total = torch.stack([torch.stack(list(entry.values())) for entry in store]).sum(dim=0)
    torch.distributed.all_reduce(total)
    return dict(zip(store[0], (total[:, 0] / total[:, 1]).tolist(), strict=True))


@BOTH_REGIMES
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_pairs_of_a_host(rank_pool, mode, per_token):
    """Completed when gradients are finalized, also where Megatron divides them itself."""
    expected = {"loss": {"token-mean": 0.65}.get(mode, 13.0), "one": 1.0, "sum": 26.0}
    expected["per_sequence"] = 13.0
    for found in on_ranks(
        rank_pool, _host_pairs, "D=2 M=1", per_token, mode, batch=batch("D=2 M=1")
    ):
        assert found == pytest.approx(expected, rel=1e-12)


def _of_other_masks(rank):
    term = LossTerm("pairs", prescribed_losses, "token-mean", mask_key="other_mask")
    aggregator = rank.aggregator(None, loss_agg_mode=None, terms=[term], denominators="deferred")
    return run(rank, aggregator)


@BOTH_REGIMES
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_term_of_another_mask(rank_pool, layout, has_tokens, per_token):
    """2 tokens of mean 1.5 beside the 40 that finalize divides by, or beside none."""
    masks = {"other_mask": OTHER_MASK}
    if not has_tokens:
        masks["loss_mask"] = [[0] * 36] * 2
    results = on_ranks(rank_pool, _of_other_masks, layout, per_token, batch=batch(layout, **masks))
    for gradient, report, is_empty in results:
        assert_gradient([gradient], 1.5, per_token)
        assert report["loss"] == report["pairs"] == pytest.approx(1.5) and not is_empty


def _without_a_token(rank):
    return [run(rank, deferred(rank, mode, options)) for mode, options, _ in MODES]


@BOTH_REGIMES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_a_token(rank_pool, layout, per_token):
    """Gradient and loss 0, metrics NaN, and the step is empty, on every rank."""
    empty = batch(layout, loss_mask=[[0] * 36] * 2)
    for found in on_ranks(rank_pool, _without_a_token, layout, per_token, batch=empty):
        for gradient, report, is_empty in found:
            assert_gradient([gradient], 0.0, per_token)
            assert report["loss"] == 0.0 and is_empty
            assert math.isnan(report["one"]) and math.isnan(report["top"])


def _one_after_another(rank):
    """Deferred, counted, deferred again, a failing one, and a loss without any aggregator."""
    number = rank.layout.num_microbatches
    found = [run(rank, deferred(rank, "seq-mean-token-mean", {}))[0]]
    kept = deferred(rank, "seq-mean-token-sum", {})
    found.append(run(rank, kept)[0])
    counted = rank.aggregator(loss_agg_mode="token-sum")
    data = counted.wrap(rank.stream(1), num_microbatches=number)
    found.append(rank.run(counted.loss_func, data)[1])
    found.append(run(rank, kept)[0])

    def by_hand(part, output, non_loss_data=False):
        mask = part["loss_mask"]
        loss = (prescribed_losses(output, part) * mask).sum() * number * rank.layout.dp
        if rank.config.calculate_per_token_loss:
            return loss / number / rank.layout.dp, mask.sum().int(), {}
        return loss, {}

    found.append(rank.run(by_hand, rank.stream(1))[1])
    found.append(run(rank, kept)[0])
    return found


@BOTH_REGIMES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deferred_step_divides_no_other(rank_pool, layout, per_token):
    """Neither one of another aggregator, counted or deferred, nor one without."""
    results = on_ranks(rank_pool, _one_after_another, layout, per_token, batch=batch(layout))
    by_hand = 26 / 40 if per_token else 26.0
    for found in filter(lambda gradients: gradients[0], results):
        for gradient, expected in zip(found, [1.25, 13.0, 26.0, 13.0, by_hand, 13.0], strict=True):
            assert_gradient([gradient], expected, per_token)


def _over_units(rank):
    aggregator = rank.aggregator(
        with_metrics, metrics={"one": "units", "top": "max"}, denominators="deferred"
    )
    try:
        run(rank, aggregator)
    except LossAggError as error:
        return str(error)


def test_units_are_refused(rank_pool):
    """They are counted before a step; nobody waits for a rank that cannot count them."""
    [found] = on_ranks(rank_pool, _over_units, "D=1 M=2", False, batch=batch("D=1 M=2"))
    assert "with a metric over 'units'" in found


def _evaluated(rank, mode):
    aggregator = rank.aggregator(loss_agg_mode=mode, denominators="deferred")
    number = rank.layout.num_microbatches
    try:
        data = aggregator.wrap(rank.stream(1), num_microbatches=number, forward_only=True)
    except LossAggError as error:
        return str(error)
    with torch.no_grad():
        store, _ = rank.run(aggregator.loss_func, data, forward_only=True)
    report = aggregator.report(store)
    return aggregator.can_evaluate, report["loss"], aggregator.is_empty


@BOTH_REGIMES
def test_evaluation_is_refused_where_it_is_planned(rank_pool, per_token):
    """Before anything has trained, with the way out."""
    for mode, _, _ in MODES[:4]:
        [found] = on_ranks(
            rank_pool, _evaluated, "D=1 M=2", per_token, mode, batch=batch("D=1 M=2")
        )
        if per_token and mode == "token-mean":
            # Megatron's own way: n travels with each microbatch, and `report` counts.
            assert found == (True, pytest.approx(0.65, rel=1e-12), False)
        else:
            assert "so it cannot evaluate. Give the evaluated stream a LossAggregator" in found
