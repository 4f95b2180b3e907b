"""An objective without a schedule or aggregator: its sums and gradient against plain autograd.

Expected values are made of masks and counts by hand, in float64, and share no code with the plugin.
Compiled evaluation is compared with the plain one in `compile/`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from megatron_lossagg import (
    GlobalCounts,
    LossTerm,
    ParallelGroups,
    count_global_batch,
    token_weights,
)
from megatron_lossagg.objective.compile.compiled import make_evaluation
from megatron_lossagg.objective.evaluation import Evaluation
from megatron_lossagg.objective.objective import Objective

MASK = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
OTHER_MASK = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 1]])
COEFFICIENTS = (1.0, -0.5, 0.0)


def policy(output, microbatch):
    losses = output.exp() * microbatch["advantages"]
    ratio = output.detach()
    metrics = {"mean": ratio, "per_sequence": ratio[:, 0], "lowest": ratio, "highest": ratio > 0}
    return losses, metrics


def penalty(output, microbatch):
    return output.square(), {"count": output > 0, "largest_row": output.detach()[:, 1]}


def unused(output, microbatch):
    return (output - output).log()  # -inf, with a gradient that is NaN


def three_terms(**options):
    terms = [
        LossTerm(
            "policy",
            policy,
            "seq-mean-token-mean",
            metrics={
                "mean": "tokens",
                "per_sequence": "sequences",
                "lowest": "min",
                "highest": "max",
            },
        ),
        LossTerm(
            "penalty",
            penalty,
            "token-mean",
            mask_key="other_mask",
            metrics={"count": "sum", "largest_row": "max"},
        ),
        LossTerm("unused", unused, "token-sum"),
    ]
    return Objective.of(terms, **options)


class Batch(NamedTuple):
    output: torch.Tensor
    microbatch: dict
    weights: list


def batch_of(objective, rows=slice(None)):
    """Rows of a batch of four, with weights by the counts of all of it."""
    generator = torch.Generator().manual_seed(7)
    output, advantages = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    masks = {"loss_mask": MASK, "other_mask": OTHER_MASK}
    weights = []
    for weighting in objective.weightings:
        mask = masks[weighting.mask_key]
        counts = GlobalCounts(mask.sum(), (mask.sum(dim=1) > 0).sum(), 4)
        mode = weighting.spec.loss_agg_mode
        weights.append(token_weights(mask, mode, counts, weight_dtype=torch.float64)[rows])
    microbatch = {"advantages": advantages[rows], **{k: m[rows] for k, m in masks.items()}}
    return Batch(output[rows].clone().requires_grad_(), microbatch, weights)


def expected_values(batch):
    """J and what is reported, from masks: a loop over sequences, and sums over tokens."""
    output, advantages = (
        batch.output.detach().clone().requires_grad_(),
        batch.microbatch["advantages"],
    )
    losses = output.exp() * advantages
    means = [row[mask == 1].mean() for row, mask in zip(losses, MASK, strict=True) if mask.any()]
    of_policy = sum(means) / len(means)
    of_penalty = output.square()[OTHER_MASK == 1].mean()
    loss = of_policy - 0.5 * of_penalty
    [gradient] = torch.autograd.grad(loss, output)
    values = output.detach()
    valid, other = MASK == 1, OTHER_MASK == 1
    reported = {
        "loss": (loss, "sum"),
        "policy": (of_policy, "sum"),
        "penalty": (of_penalty, "sum"),
        "unused": (torch.tensor(-math.inf), "sum"),
        "mean": (values[valid].sum(), "sum"),
        "per_sequence": (values[valid.any(dim=1), 0].sum(), "sum"),
        "count": ((values[other] > 0).sum(), "sum"),
        "lowest": (values[valid].min(), "min"),
        "highest": ((values[valid] > 0).any(), "max"),
        "largest_row": (values[other.any(dim=1), 1].max(), "max"),
    }
    return {
        name: (float(value.detach()), kind) for name, (value, kind) in reported.items()
    }, gradient


def merged(parts):
    """Partial values of several microbatches, by their kinds alone."""
    put_together = {"sum": sum, "min": min, "max": max}
    return {
        name: (put_together[kind]([float(part[name].value) for part in parts]), kind)
        for name, (_, kind) in parts[0].items()
    }


@pytest.mark.parametrize("splits", [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 3), (3, 4)]])
def test_terms_and_metrics_of_any_split(splits):
    """J, its gradient, terms and metrics of each kind are those of one autograd graph."""
    objective = three_terms()
    evaluate = Evaluation(objective)
    parts, gradients = [], []
    for start, end in splits:
        batch = batch_of(objective, slice(start, end))
        sums = evaluate(batch.output, batch.microbatch, batch.weights, COEFFICIENTS)
        sums.total.backward()
        gradients.append(batch.output.grad)
        parts.append(sums.by_name(objective))
    expected, gradient = expected_values(batch_of(objective))
    found = merged(parts)
    assert set(found) == set(expected)
    for name, (value, kind) in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-14), kind), name
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-14, atol=1e-16)


def test_counted_by_the_library():
    """Weights by `count_global_batch`, one term, no metric: the mean over sequences."""
    objective = Objective.of([LossTerm("only", policy_alone, "seq-mean-token-mean")])
    counts = count_global_batch([MASK], ParallelGroups.single_process())
    weights = token_weights(MASK, "seq-mean-token-mean", counts, weight_dtype=torch.float64)
    output = torch.arange(20, dtype=torch.float64).view(4, 5).requires_grad_()
    sums = Evaluation(objective)(output, {}, [weights], [1.0])
    assert sums.total.item() == pytest.approx((7 / 4 + 6 + 10.5) / 3, rel=1e-15)
    assert sums.metric_sums is None and sums.extremes is None
    sums.total.backward()
    assert torch.equal(output.grad, weights)


def policy_alone(output, microbatch):
    return output


def test_nan_and_inf_at_masked_tokens_reach_nothing():
    """Neither values nor gradients of a NaN that the loss_fn did not make itself."""
    objective = Objective.of(
        [LossTerm("only", lambda o, _: (o, {"m": o, "low": o}), "token-mean",
                  metrics={"m": "tokens", "low": "min"})]
    )  # fmt: skip
    batch = batch_of(objective)
    dirty = batch.output.detach().masked_fill(MASK == 0, math.nan).requires_grad_()
    sums = Evaluation(objective)(dirty, {}, batch.weights, [1.0])
    sums.total.backward()
    clean = batch.output.detach()[MASK == 1]
    found = sums.by_name(objective)
    assert sums.total.item() == pytest.approx(float(clean.mean()), rel=1e-14)
    assert float(found["m"].value) == pytest.approx(float(clean.sum()), rel=1e-14)
    assert float(found["low"].value) == float(clean.min())
    assert torch.equal(dirty.grad, batch.weights[0])


def test_what_is_reported_has_no_graph_and_is_no_view_of_the_total():
    """A schedule rescales in place what it gets."""
    objective = three_terms()
    batch = batch_of(objective)
    sums = Evaluation(objective)(batch.output, batch.microbatch, batch.weights, COEFFICIENTS)
    before = sums.values.clone()
    for tensor in (sums.values, sums.metric_sums, sums.extremes):
        assert not tensor.requires_grad
    sums.total.detach().mul_(7)
    assert torch.equal(sums.values, before)


def test_all_coefficients_0():
    """A total of 0 with a graph, whose gradient is 0."""
    objective = three_terms()
    batch = batch_of(objective)
    sums = Evaluation(objective)(batch.output, batch.microbatch, batch.weights, (0.0, 0.0, 0.0))
    sums.total.backward()
    assert sums.total.item() == 0 and not batch.output.grad.any()


@pytest.mark.parametrize("compile", [False, True])
def test_preparing_is_part_of_every_evaluation(compile):
    """Once per microbatch, whatever evaluates it and however many terms there are."""
    calls = []

    def prepare(output, microbatch):
        calls.append(microbatch)
        return output * 2

    objective = Objective.of(
        [LossTerm("a", policy_alone, "token-mean"), LossTerm("b", policy_alone, "token-sum")],
        prepare,
    )
    batch = batch_of(objective)
    evaluate = make_evaluation(objective, compile=compile)
    with torch.compiler.set_stance("force_eager"):
        sums = evaluate(batch.output, batch.microbatch, batch.weights, [1.0, 0.25])
    sums.total.backward()
    of_token = 2 * (1 / int(MASK.sum()) + 0.25) * (MASK == 1).double()
    assert len(calls) == 1
    torch.testing.assert_close(batch.output.grad, of_token, rtol=1e-14, atol=0)
