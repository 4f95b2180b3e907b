"""Property: in R3 n is the number of valid tokens of `loss_mask`, whatever the objective is.

Megatron divides all gradients by the sum of n. What a mode, a term or another mask gives weight to
must not change it: the scalar model's gradient shows J, and the losses that real MoE routers and
multi-token prediction layers add themselves keep the gradient that they have beside a `loss_func`
by hand.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from objectives import LAYOUTS, PLANNINGS, assert_planned, batch_f, one_term, own_mode
from own_losses import ByHand, WithPlugin, norm, run_plans
from prescribed import prescribed_losses
from test_moe import SAME, moe_gpt
from test_mtp import GPT as MTP_GPT
from test_mtp import model_losses

from megatron_lossagg import LossAggregator
from megatron_lossagg.testing import Layout, RankFailure
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.verification.aggregator_plan import policy_gradient_losses
from megatron_lossagg.verification.cases import standard_batch

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
ALL_PLANNINGS = pytest.mark.parametrize("planning", PLANNINGS)
ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)


def with_own_mode(name):
    return {"loss_fn": prescribed_losses, "loss_agg_mode": own_mode(name)}


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("drop-long", 10 / 3), ("falling", 146 / 3), ("centred", 14 / 3), ("nothing", 0.0)],
)
def test_modes_that_give_valid_tokens_no_weight(
    rank_pool, mode, expected, layout, planning, per_token
):
    """trl#6439: sequences of weight 0, of negative weight, of both, and a batch of weight 0."""
    make = partial(with_own_mode, mode)
    batch = batch_f(layout)
    assert_planned(rank_pool, batch, layout, make, planning, per_token, expected, is_empty=False)


def pairs_only():
    return {"terms": [one_term("token-mean", "pair_mask")]}


def pairs_and_tokens():
    tokens = replace(one_term("seq-mean-token-mean"), name="tokens")
    return {"terms": [one_term("token-mean", "pair_mask"), tokens]}


@BOTH_REGIMES
@ALL_PLANNINGS
@ALL_LAYOUTS
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "none"])
def test_terms_of_another_mask(rank_pool, layout, planning, per_token, has_tokens):
    """2 tokens in their mask beside the 7 of `loss_mask`, or beside none."""
    batch = batch_f(layout) if has_tokens else batch_f(layout, loss_mask=[[0] * 4] * 4)
    assert_planned(
        rank_pool, batch, layout, pairs_only, planning, per_token, 3.5, term=3.5, is_empty=False
    )
    tokens = 3.5 if has_tokens else 0.0
    assert_planned(
        rank_pool,
        batch,
        layout,
        pairs_and_tokens,
        planning,
        per_token,
        3.5 + tokens,
        term=pytest.approx(3.5),
        tokens=pytest.approx(tokens),
        is_empty=False,
    )


@BOTH_REGIMES
@ALL_PLANNINGS
def test_a_batch_without_a_loss_mask(rank_pool, planning, per_token):
    """The mask of the first term stands in: its tokens are n."""
    batch = batch_f("D=2 M=2")
    rows = {key: value for key, value in batch.rows.items() if key != "loss_mask"}
    batch = type(batch)(rows, batch.assignment)
    assert_planned(rank_pool, batch, "D=2 M=2", pairs_only, planning, per_token, 3.5)


def with_sample_mask():
    return {"terms": [one_term("seq-mean-token-sum", "pair_mask")]}


@BOTH_REGIMES
@ALL_PLANNINGS
def test_rows_that_only_pad_the_batch(rank_pool, planning, per_token):
    """Their tokens are not counted in n either: row 1 is left out, row 0 remains."""
    batch = batch_f("D=2 M=2", sample_mask=[1, 0, 1, 1])
    assert_planned(rank_pool, batch, "D=2 M=2", with_sample_mask, planning, per_token, 1.0)


OBJECTIVES = [
    (mode, mask_key, planning)
    for mode, mask_key in (
        ("drop-long", "loss_mask"),
        ("token-mean", "pair_mask"),
        ("seq-mean-token-mean", "pair_mask"),
    )
    for planning in ("begin_step", "wrap", "adapter")
]


def other_objectives(token_losses):
    return [
        WithPlugin(token_losses, mode, mask_key=mask_key, planning=planning)
        for mode, mask_key, planning in OBJECTIVES
    ]


def run_with_own_mode(*arguments):
    """As `run_plans`, on ranks that know "drop-long"."""
    own_mode("drop-long")
    return run_plans(*arguments)


def batch_with_pairs(layout, *, has_tokens):
    """The standard batch with a second mask of a few tokens outside and inside of the first."""
    batch = standard_batch(Layout.parse(layout))
    pairs = torch.zeros_like(batch.rows["loss_mask"])
    pairs[::4, 5] = 1
    rows = {**batch.rows, "pair_mask": pairs}
    if not has_tokens:
        rows["loss_mask"] = torch.zeros_like(pairs)
    return type(batch)(rows, batch.assignment)


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "none"])
@pytest.mark.parametrize("regime", ["R1", "R3"])
@pytest.mark.parametrize("layout", ["EP=2 D=2 M=2", "EP=2 C=2 M=2"])
def test_auxiliary_losses_of_moe(rank_pool, layout, regime, has_tokens):
    """Megatron-LM#3768: the gradient of a `loss_func` by hand with the same `loss_mask`."""
    plans = other_objectives(policy_gradient_losses)
    plans = [plan for plan in plans if plan.planning != "adapter"]
    batch = batch_with_pairs(layout, has_tokens=has_tokens)
    parsed = Layout.parse(layout)
    [(expected, _), *results] = rank_pool.run(
        run_with_own_mode,
        batch,
        parsed,
        moe_gpt(),
        regime == "R3",
        [ByHand(policy_gradient_losses), *plans],
        world_size=parsed.world_size,
    )[0]
    assert norm(expected, "router") > 0
    for plan, (gradients, _) in zip(plans, results, strict=True):
        assert relative_error(gradients, expected) <= SAME, plan


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "none"])
@pytest.mark.parametrize("layout", ["D=2 M=2", "C=2 M=2"])
def test_multi_token_prediction(rank_pool, layout, has_tokens):
    """Its loss is over the valid tokens of `loss_mask`, also where weights or pairs displace it."""
    plans = other_objectives(model_losses)
    batch = batch_with_pairs(layout, has_tokens=has_tokens)
    parsed = Layout.parse(layout)
    [(expected, _), *results] = rank_pool.run(
        run_with_own_mode,
        batch,
        parsed,
        MTP_GPT,
        True,
        [ByHand(model_losses), *plans],
        world_size=parsed.world_size,
    )[0]
    assert (norm(expected, "mtp.") > 0) == has_tokens
    for plan, (gradients, _) in zip(plans, results, strict=True):
        if has_tokens:
            assert relative_error(gradients, expected) <= SAME, plan
        else:
            assert norm(gradients) == norm(expected) == 0, plan


def _lost(change):
    """The message of a step whose microbatches were changed on their way to loss_func."""
    from types import SimpleNamespace

    from megatron_lossagg import ParallelGroups

    aggregator = LossAggregator(
        terms=[one_term("token-mean", "pair_mask")] if change == "mask" else None,
        loss_fn=None if change == "mask" else prescribed_losses,
        loss_agg_mode=None if change == "mask" else own_mode("drop-long"),
        model_config=SimpleNamespace(calculate_per_token_loss=True),
        groups=ParallelGroups.single_process(),
    )
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    losses = torch.ones(2, 4, requires_grad=True)
    pair_mask = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]])
    microbatch = {"losses": losses.detach(), "loss_mask": mask, "pair_mask": pair_mask}
    step = aggregator.begin_step([microbatch])
    [planned] = step.microbatches
    if change == "mask":
        del planned["loss_mask"]
    else:
        planned["loss_weights"] = planned["loss_weights"] + 0.0
    step.loss_func(planned, losses)
    step.validate()


@pytest.mark.parametrize("change", ["mask", "sign"])
def test_a_number_that_was_lost_is_found(rank_pool, change):
    """A host that drops `loss_mask`, or adds 0 to weights: raised before the optimizer steps."""
    with pytest.raises(RankFailure, match="numbers of tokens that loss_func returned sum to 1, "):
        rank_pool.run(_lost, change, world_size=1)
