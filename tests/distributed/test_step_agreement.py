"""Ranks that should see the same of a step: a difference raises on all, before the optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from steps_over_ranks import (
    TIMEOUT_S,
    make_aggregator,
    make_microbatches,
    message_of,
    run_microbatches,
)

from megatron_lossagg import LossTerm, ParallelGroups


def _losses(output, microbatch):
    return output


def _terms(num, **options):
    terms = [LossTerm(f"t{i}", _losses, "token-mean", **options) for i in range(num)]
    return {"loss_agg_mode": None, "terms": terms}


def _metrics(num):
    def loss_fn(output, microbatch):
        return output, {f"m{i}": output.detach() for i in range(num)}

    return {"loss_fn": loss_fn, "metrics": {f"m{i}": "tokens" for i in range(num)}}


def _options(name, is_odd):
    """What a rank is built with; `name` says in what the odd one differs."""
    return {
        "terms": _terms(3 if is_odd else 2),
        "modes": {"loss_agg_mode": "seq-mean-token-mean" if is_odd else "token-mean"},
        "masks": _terms(2, mask_key="other_mask" if is_odd else "loss_mask"),
        "metrics": _metrics(2 if is_odd else 1),
        "many modes": {
            "loss_agg_mode": None,
            "terms": [
                LossTerm(f"t{i}", _losses, f"length-power-{0.1 * i + 0.05:.2f}")
                for i in range(1, 20 if is_odd else 19)
            ],
        },
        "coefficient": _terms(2, coefficient=100.0 if is_odd else 1.0),
        "nothing": {},
    }[name]


def _groups(axis):
    world = dist.group.WORLD
    return {
        "dp": ParallelGroups(dp=world, dp_cp=world),
        "cp": ParallelGroups(cp=world, dp_cp=world),
        "tp": ParallelGroups(tp=world),
    }[axis]


def _step(axis, name):
    options = _options(name, is_odd=dist.get_rank() == 1)
    microbatches = make_microbatches([3, 5])
    for microbatch in microbatches:
        microbatch["other_mask"] = microbatch["loss_mask"]
    return make_aggregator(_groups(axis), **options).begin_step(microbatches)


def _validated(axis, name):
    step = _step(axis, name)
    run_microbatches(step)
    return message_of(step.validate)


NAMES = ["terms", "modes", "masks", "metrics", "many modes", "coefficient"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", ["dp", "cp", "tp"])
def test_options_that_differ_raise_on_every_rank(rank_pool, axis, name):
    """Also where they decide how long messages are: these have one length, whatever there is."""
    messages = rank_pool.run(_validated, axis, name, world_size=2, timeout_s=TIMEOUT_S)
    for message in messages:
        assert "parallel ranks were configured differently: " in message
        assert "on rank 0 and" in message and "on rank 1" in message


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_equal_ranks_agree(rank_pool, axis):
    """Nothing is raised where nothing differs."""
    assert (
        rank_pool.run(_validated, axis, "nothing", world_size=2, timeout_s=TIMEOUT_S) == [None] * 2
    )


def _reported_without_validate(name):
    step = _step("dp", name)
    store = run_microbatches(step)
    return message_of(step.report, store)


@pytest.mark.parametrize("name", NAMES)
def test_a_report_that_was_not_compared_is_compared_first(rank_pool, name):
    """`report` without `validate`: its message has a length that terms and metrics decide."""
    messages = rank_pool.run(_reported_without_validate, name, world_size=2, timeout_s=TIMEOUT_S)
    for message in messages:
        assert message.startswith("Before the report: the data x context parallel ranks were ")


def _on_tp_ranks(what):
    rank = dist.get_rank()
    microbatches = make_microbatches([3, 5])
    step = make_aggregator(_groups("tp")).begin_step(microbatches)
    planned = step.microbatches
    for microbatch in planned:
        losses = microbatch["losses"]
        if what == "losses" and rank == 1:
            losses = losses * 1.01
        if what == "rounding":
            losses = losses * (1 + 1e-9 * rank)
        if what == "NaN" and rank == 1:
            losses = losses * torch.nan
        if what == "weights" and rank == 1:
            tokens = microbatch["loss_weights"] != 0
            moved = torch.zeros_like(losses).masked_fill(tokens.roll(8, 1), 1 / 7)
            microbatch["loss_weights"] = moved
        loss, report = step.loss_func(microbatch, losses)
        loss /= step.num_microbatches
        loss.backward()
    return message_of(step.validate)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("losses", "losses differ between tensor-parallel ranks: "),
        ("NaN", "losses differ between tensor-parallel ranks: "),
        ("weights", "differ between tensor-parallel ranks: "),
    ],
)
def test_what_differs_between_tensor_parallel_ranks(rank_pool, what, said):
    """A loss of one rank's shard, a NaN on one, and weights that did not come by broadcast."""
    messages = rank_pool.run(_on_tp_ranks, what, world_size=2, timeout_s=TIMEOUT_S)
    for message in messages:
        assert said in message and "Before the optimizer steps" in message


@pytest.mark.parametrize("what", ["nothing", "rounding"])
def test_rounding_between_tensor_parallel_ranks_is_no_difference(rank_pool, what):
    """Kernels may round differently: sums agree within 1e-4 of the sum of |S|."""
    assert rank_pool.run(_on_tp_ranks, what, world_size=2, timeout_s=TIMEOUT_S) == [None, None]
