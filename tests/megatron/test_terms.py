"""Property: the gradient of a sum of terms is exact, each with its mode, mask and coefficient.

Whole-model gradients on the real schedules against one process that loops over sequences, and every
reported value (terms, metrics, counts) against the same loops.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from pairs import all_pairs
from prescribed import batch_of, even, run

from megatron_lossagg import LossAggregator, LossTerm, slice_for_cp
from megatron_lossagg.testing import (
    GlobalBatch,
    Layout,
    StepPlan,
    TinyGPT,
    reference_gradient,
    relative_error,
    run_global_batch,
    token_log_probs,
)
from megatron_lossagg.verification.cases import ALL_REGIMES, GRADIENT_BOUNDS, standard_batch

LONG = pytest.mark.conformance
KL_COEFFICIENT, VALUE_COEFFICIENT = 0.05, 0.5
METRICS = {"ratio": "tokens", "ratio_sum": "sum", "ratio_max": "max", "ratio_min": "min"}
METRICS |= {"length": "sequences"}


def prepare(logits, microbatch):
    """What all terms share."""
    return token_log_probs(logits, microbatch["labels"])


def policy(log_probs, microbatch):
    ratio = (log_probs - microbatch["old_log_probs"]).exp()
    values = {"ratio": ratio, "ratio_sum": ratio, "ratio_max": ratio, "ratio_min": ratio}
    return -microbatch["advantages"] * ratio, values | {"length": torch.ones_like(ratio)}


def kl(log_probs, microbatch):
    difference = microbatch["old_log_probs"] - log_probs
    return difference.exp() - difference - 1


def value(log_probs, microbatch):
    return (log_probs - microbatch["advantages"]).square()


def never(log_probs, microbatch):
    """A term that is only looked at: NaN, and of coefficient 0."""
    return log_probs * math.nan


def schedule(iteration):
    return KL_COEFFICIENT * iteration / 4


TERMS = (
    LossTerm("kl", kl, "seq-mean-token-mean", schedule),
    LossTerm("policy", policy, "token-mean", metrics=METRICS),
    LossTerm(
        "value",
        value,
        "seq-mean-token-sum-norm",
        VALUE_COEFFICIENT,
        mask_key="value_mask",
        loss_scale_factor=3,
    ),
    LossTerm("watched", never, "token-mean", 0),
)


@dataclass(frozen=True)
class TermsPlan:
    """A step of the terms above."""

    returns: str
    planning: str
    compile: bool = False

    def __call__(self, context):
        aggregator = LossAggregator(
            prepare,
            terms=TERMS,
            model_config=context.model_config,
            returns=self.returns,
            weight_dtype=torch.float64,
            report_counts=True,
            compile=self.compile,
        )
        count = len(context.microbatches)
        if self.planning == "wrap":
            data = aggregator.wrap(
                [iter(context.microbatches) for _ in context.chunks],
                num_microbatches=count,
                iteration=lambda: 4,
            )
            step = aggregator
        else:
            step = aggregator.begin_step(context.microbatches, iteration=4)
            data = step.data_iterator(len(context.chunks))

        def forward_step(data_iterator, model):
            microbatch = slice_for_cp(next(data_iterator))
            logits = model(microbatch["tokens"], microbatch["position_ids"], None)
            return logits, partial(step.loss_func, microbatch)

        def finish(store):
            if self.planning == "wrap":
                aggregator.validate()
                return aggregator.report(store)
            step.validate()
            return step.report(store)

        return StepPlan(forward_step, data, count, finish)


def batch_with_value_mask(layout):
    """The standard batch, and a second mask that differs from the first in every row."""
    batch = standard_batch(layout)
    mask = batch.rows["loss_mask"]
    other = torch.zeros_like(mask)
    other[:, 3:9] = 1
    other[2] = 0
    return GlobalBatch({**batch.rows, "value_mask": other}, batch.assignment)


def objective(logits, rows):
    """Loops over sequences; also what a report must say."""
    log_probs = token_log_probs(logits, rows["labels"])
    policy_losses, values = policy(log_probs, rows)
    kl_losses, value_losses = kl(log_probs, rows), value(log_probs, rows)
    ratio = values["ratio"]
    per_sequence, policy_sum, value_sum, ratios = [], 0.0, 0.0, []
    for row in range(logits.shape[0]):
        counted = rows["loss_mask"][row] > 0
        if counted.any():
            per_sequence.append(kl_losses[row][counted].mean())
        policy_sum = policy_sum + policy_losses[row][counted].sum()
        ratios += ratio[row][counted].tolist()
        value_sum = value_sum + value_losses[row][rows["value_mask"][row] > 0].sum()
    parts = {
        "policy": policy_sum / len(ratios),
        "kl": sum(per_sequence) / len(per_sequence),
        "value": value_sum / 3,
    }
    total = parts["policy"] + KL_COEFFICIENT * parts["kl"] + VALUE_COEFFICIENT * parts["value"]
    return total, parts, ratios, len(per_sequence)


def total_of(logits, rows):
    return objective(logits, rows)[0]


def reports_of(gpt, batch):
    """The values that every report must have, in one process."""
    from megatron_lossagg.testing.model.model_chunks import build_model_chunks

    [chunk] = build_model_chunks(gpt, Layout(), wrap_with_ddp=False)
    rows = batch.rows
    with torch.no_grad():
        logits = chunk(rows["tokens"], rows["position_ids"], None)
        total, parts, ratios, num_seqs = objective(logits, rows)
    num_tokens = len(ratios)
    return {
        "loss": total.item(),
        **{name: part.item() for name, part in parts.items()},
        "ratio": sum(ratios) / num_tokens,
        "ratio_sum": sum(ratios),
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "length": num_tokens / num_seqs,
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "response_length": num_tokens / num_seqs,
        "masked_fraction": 1 - num_tokens / rows["loss_mask"].numel(),
    }


CASES = [
    ("PP=2 D=2 M=4", "R1", "begin_step"),
    ("C=2 D=2 M=2", "R3", "begin_step"),
    ("TP=2 PP=2 M=4", "R3", "wrap"),
    *(
        pytest.param(*case, marks=LONG)
        for case in all_pairs(
            ("TP=2 PP=2 M=4", "PP=2 VPP=2 C=2 M=4"),
            ALL_REGIMES,
            ("begin_step", "wrap"),
        )
    ),
]


@pytest.mark.parametrize(("text", "regime", "planning"), CASES)
def test_gradient_and_every_reported_value(rank_pool, text, regime, planning):
    """Three modes, two masks, a schedule, a term of coefficient 0 that is NaN, five normalisers."""
    layout, gpt = Layout.parse(text), TinyGPT()
    batch = batch_with_value_mask(layout)
    [(expected, gradient)] = rank_pool.run(reference_gradient, gpt, batch, total_of, world_size=1)
    [values] = rank_pool.run(reports_of, gpt, batch, world_size=1)
    per_token, returns = ALL_REGIMES[regime]
    results = rank_pool.run(
        run_global_batch,
        batch,
        layout,
        TermsPlan(returns, planning),
        gpt=gpt,
        calculate_per_token_loss=per_token,
        world_size=layout.world_size,
    )
    assert relative_error(results[0].gradients, gradient) <= GRADIENT_BOUNDS[regime]
    assert values["loss"] == pytest.approx(expected, rel=1e-14)
    reports = [result.report for result in results if result.report is not None]
    assert planning == "wrap" or len(reports) == layout.world_size
    for report in reports:
        assert math.isnan(report.pop("watched"))
        assert report.keys() == values.keys()
        for name, value in values.items():
            assert report[name] == pytest.approx(value, rel=1e-12), name


@LONG
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize("regime", ["R1", "R3"])
def test_compiled_terms_are_exact_on_the_schedule(rank_pool, regime):
    """compile=True on two pipeline stages: the whole model's gradient, with the plain bounds."""
    layout, gpt = Layout.parse("PP=2 M=2"), TinyGPT()
    batch = batch_with_value_mask(layout)
    [(expected, gradient)] = rank_pool.run(reference_gradient, gpt, batch, total_of, world_size=1)
    per_token, returns = ALL_REGIMES[regime]
    results = rank_pool.run(
        run_global_batch,
        batch,
        layout,
        TermsPlan(returns, "begin_step", compile=True),
        gpt=gpt,
        calculate_per_token_loss=per_token,
        world_size=layout.world_size,
    )
    assert relative_error(results[0].gradients, gradient) <= GRADIENT_BOUNDS[regime]
    assert results[0].report["loss"] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_17_a_second_head_does_not_scale_with_the_microbatches(rank_pool, num_microbatches):
    """verl-project/verl#6957: 1, 1, 1, 5 tokens, value loss 2 each: 2.0 at M=1 and M=4, not 8."""
    mask = [[1] + [0] * 4] * 3 + [[1] * 5]
    batch = batch_of([[2.0] * 5] * 4, mask, even(4, 1, num_microbatches))
    plan = SecondHead()
    gradients, reports = run(rank_pool, batch, f"D=1 M={num_microbatches}", "token-mean", plan=plan)
    assert reports[0]["value"] == pytest.approx(2.0, rel=1e-14)
    assert reports[0]["policy"] == pytest.approx(0.0, abs=1e-14)
    assert list(gradients.values()) == [pytest.approx(2.0, rel=1e-14)]


@dataclass(frozen=True)
class SecondHead:
    """A policy loss of 0 and a value loss on one output."""

    def __call__(self, context):
        terms = [
            LossTerm("policy", lambda output, microbatch: output * 0, "token-mean"),
            LossTerm("value", lambda out, mb: out * mb["losses"], "token-mean"),
        ]
        aggregator = LossAggregator(
            terms=terms, model_config=context.model_config, weight_dtype=torch.float64
        )
        step = aggregator.begin_step(context.microbatches)

        def forward_step(data_iterator, model):
            microbatch = next(data_iterator)
            return model(microbatch["loss_mask"]), partial(step.loss_func, microbatch)

        def finish(store):
            step.validate()
            return step.report(store)

        return StepPlan(
            forward_step, step.data_iterator(len(context.chunks)), step.num_microbatches, finish
        )
