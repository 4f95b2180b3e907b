"""Ranks that were configured differently: every one says which option, with values and ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from steps_over_ranks import (
    TIMEOUT_S,
    CollectiveCounter,
    data_parallel_groups,
    make_aggregator,
    make_microbatches,
    message_of,
    run_microbatches,
)

from megatron_lossagg import LossTerm
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.weights.deferred import DeferredPlan, sum_over_ranks
from megatron_lossagg.weights.microbatch import WeightOptions
from megatron_lossagg.weights.weighting import Weighting

NORM = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4}


def _as_they_are(output, microbatch):
    return output


def _with_metric(output, microbatch):
    return output, {"size": output.detach()}


def _terms(*names, mask_key="loss_mask", coefficient=1.0, loss_agg_mode="token-mean"):
    terms = [
        LossTerm(name, _as_they_are, loss_agg_mode, coefficient=coefficient, mask_key=mask_key)
        for name in names
    ]
    return {"loss_agg_mode": None, "terms": terms}


def _metric(normaliser):
    return {"loss_fn": _with_metric, "metrics": {"size": normaliser}}


def _validated(options_of_ranks, steps_of_ranks):
    rank = min(dist.get_rank(), 1)
    options = dict(options_of_ranks[rank])
    step_options = dict(steps_of_ranks[rank])
    microbatches = make_microbatches([3, 2])
    for microbatch in microbatches:
        microbatch["other_mask"] = microbatch["loss_mask"]
        if step_options.get("drops_loss_mask"):
            del microbatch["loss_mask"]
    step_options.pop("drops_loss_mask", None)
    step = make_aggregator(**options).begin_step(microbatches, **step_options)
    with CollectiveCounter() as collectives:
        run_microbatches(step)
        message = message_of(step.validate)
    return message, collectives.calls


@pytest.mark.parametrize(
    ("first", "others", "said"),
    [
        (
            {},
            {"loss_agg_mode": "token-sum"},
            "loss_agg_mode is 'token-mean' on {0} and 'token-sum'",
        ),
        (NORM, NORM | {"loss_scale_factor": 5}, "loss_scale_factor is 4.0 on {0} and 5.0 on {1}"),
        (NORM, NORM | {"norm_semantics": "seq-mean"}, "norm_semantics is 'sum' on {0} and 'seq-"),
        (
            {},
            {"sequence_count": "nominal"},
            "sequence_count is 'valid' on {0} and 'nominal' on {1}",
        ),
        ({}, {"cp_gradient": "gathered"}, "cp_gradient is 'local' on {0} and 'gathered' on {1}"),
        ({}, {"weight_dtype": torch.float32}, "weight_dtype is 'float64' on {0} and 'float32' on"),
        ({}, {"per_token": True}, "the regime is R1 on {0} and R3 on {1}"),
        ({}, {"report_counts": True}, "report_counts is False on {0} and True on {1}"),
        (_terms("a"), _terms("b"), "terms is a on {0} and b on {1}"),
        (
            _terms("a"),
            _terms("a", coefficient=2),
            "the coefficient of term 'a' is 1.0 on {0} and 2",
        ),
        (
            _terms("a", mask_key="loss_mask"),
            _terms("a", mask_key="other_mask"),
            "term 'a': mask_key is 'loss_mask' on {0} and 'other_mask' on {1}",
        ),
        (
            _terms("a"),
            _terms("a", loss_agg_mode="token-sum"),
            "term 'a': loss_agg_mode is 'token-mean' on {0} and 'token-sum' on {1}",
        ),
        (
            _metric("tokens"),
            _metric("sequences"),
            "metric 'size' is 'tokens' on {0} and 'sequences",
        ),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.filterwarnings("ignore:sequence_count")
def test_every_rank_says_which_option_differs(rank_pool, first, others, said, world_size):
    """Option, values and ranks, the same on all of them; and which arguments must agree."""
    results = rank_pool.run(
        _validated, [first, others], [{}, {}], world_size=world_size, timeout_s=TIMEOUT_S
    )
    ranks = ["rank 0", "rank 1" if world_size == 2 else "ranks 1, 2"]
    [message] = {message for message, _ in results}
    assert "The data-parallel ranks were configured differently: " in message
    assert said.format(*ranks) in message
    assert "the same arguments on every rank" in message


@pytest.mark.parametrize(
    ("first", "others", "said"),
    [
        (
            {"iteration": 1},
            {"iteration": 100},
            "the coefficient of term 'a' is 1.0 on rank 0 and 10",
        ),
        (
            {},
            {"drops_loss_mask": True},
            "'loss_mask' in the microbatches is True on rank 0 and Fal",
        ),
    ],
)
def test_what_differs_in_a_step_alone_is_told(rank_pool, first, others, said):
    """A coefficient that a schedule gives, and a batch without the mask that Megatron counts."""
    options = _terms("a", mask_key="other_mask", coefficient=_as_the_iteration)
    steps = [{"iteration": 1, **first}, {"iteration": 1, **others}]
    results = rank_pool.run(
        _validated, [options, options], steps, world_size=2, timeout_s=TIMEOUT_S
    )
    for message, _ in results:
        assert said in message


def _as_the_iteration(iteration):
    return iteration


def test_equally_configured_ranks_exchange_nothing(rank_pool):
    """The factor 4 and 4.0 are one configuration; a good step has no collective for options."""
    results = rank_pool.run(
        _validated,
        [NORM, NORM | {"loss_scale_factor": 4.0}],
        [{}, {}],
        world_size=2,
        timeout_s=TIMEOUT_S,
    )
    assert results == [(None, ["all_reduce"])] * 2


def _deferred_sum(modes):
    mode = modes[dist.get_rank()]
    options = WeightOptions((Weighting(ModeSpec(mode)),), ("weights",), torch.float64)
    plan = DeferredPlan(options, 1, identity={"loss_agg_mode": repr(mode)})
    for index, microbatch in enumerate(make_microbatches([3])):
        plan.with_weights(microbatch, index)
    return message_of(sum_over_ranks, plan, data_parallel_groups())


def test_deferred_counts_tell_what_differs(rank_pool):
    """Where counts are summed when gradients are finalized, too, and then on every rank."""
    modes = ["seq-mean-token-sum", "seq-mean-token-mean"]
    [message] = set(rank_pool.run(_deferred_sum, modes, world_size=2, timeout_s=TIMEOUT_S))
    assert (
        "loss_agg_mode is 'seq-mean-token-sum' on rank 0 and 'seq-mean-token-mean' on rank 1"
        in message
    )
    equal = rank_pool.run(_deferred_sum, modes[:1] * 2, world_size=2, timeout_s=TIMEOUT_S)
    assert equal == [None, None]
