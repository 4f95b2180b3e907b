"""Property: the plugin leaves the loss of multi-token prediction alone, and counts its own right.

Real MTP layers. What they leave in the gradient is compared with a `loss_func` by hand; the
gradient of the main loss is compared with plain autograd in one process, to float32's accuracy,
since Megatron's own cross entropy computes in float32.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from own_losses import MODES, ByHand, WithPlugin, deferred, norm, run_plans, with_units
from test_moe import moe_gpt
from test_options import RECOMPUTE

from megatron_lossagg.schedule.probe import mtp_loss_is_finite_without_tokens
from megatron_lossagg.testing import RankFailure
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import token_log_probs
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg.verification.cases import standard_batch

PER_TOKEN = {"R1": False, "R3": True}
LONG = pytest.mark.conformance
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
GPT = TinyGPT(num_layers=2, position_embedding_type="none", overrides=MTP)


def model_losses(output, batch):
    """The model's own token losses; in float64 from here on."""
    return output.double()


def negative_log_probs(logits, batch):
    return -token_log_probs(logits, batch["labels"])


def plugin_plans(**fields):
    plans = [WithPlugin(model_losses, m, tuple(o.items()), **fields) for m, o in MODES]
    if fields.get("planning") == "adapter":
        return [plan for plan in plans if not plan.loss_agg_mode.startswith("unit")]
    return plans


def run(pool, text, regime, plans, gpt=GPT, **options):
    """(gradient of the whole model, report) of every plan, from rank 0."""
    layout = Layout.parse(text)
    batch, per_token = with_units(standard_batch(layout)), PER_TOKEN[regime]
    return pool.run(
        run_plans, batch, layout, gpt, per_token, plans, world_size=layout.world_size, **options
    )[0]


@pytest.fixture(scope="module")
def regimes(rank_pool):
    """Where the plugin accepts MTP with the installed Megatron."""
    [is_finite] = rank_pool.run(mtp_loss_is_finite_without_tokens, world_size=1)
    return ("R1", "R3") if is_finite else ("R3",)


@pytest.mark.parametrize(
    "text",
    [
        "C=2 M=4",
        *(
            pytest.param(text, marks=LONG)
            for text in (
                "D=2 M=1",
                "D=2 M=4",
                "C=2 D=2 M=1",
                "C=2 D=2 M=4",
                "PP=2 D=2 M=4",
                "PP=2 C=2 M=4",
                "TP=2 D=2 M=4",
            )
        ),
    ],
)
def test_mtp_losses_are_the_same_with_the_plugin(rank_pool, regimes, text):
    """Main loss zeroed: every mode leaves the gradient of a loss_func by hand.

    With the adapter, weights ride in the field from which the model takes its 0/1 mask.
    """
    for regime in regimes:
        plans = [*plugin_plans(), *plugin_plans(planning="adapter")]
        if regime == "R3":
            plans.append(deferred(model_losses))
        (expected, _), *results = run(rank_pool, text, regime, [ByHand(model_losses), *plans])
        for part in ("mtp.layers.0", "decoder", "word_embeddings", "output_layer"):
            assert norm(expected, part) > 0.01 * norm(expected), part
        for plan, (gradients, _) in zip(plans, results, strict=True):
            assert relative_error(gradients, expected) <= 1e-12, (regime, plan)


@LONG
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE["full"]], ids=["plain", "recompute"])
@pytest.mark.parametrize("text", ["EP=2 D=2 M=4", "EP=2 C=2 D=2 M=1"])
def test_mtp_layers_with_experts(rank_pool, regimes, text, recompute):
    """Both losses of Megatron's own at once, experts in the MTP layer too."""
    gpt = replace(GPT, overrides={**MTP, **moe_gpt().overrides, **recompute})
    for regime in regimes:
        plans = plugin_plans()
        (expected, _), *results = run(
            rank_pool, text, regime, [ByHand(model_losses), *plans], gpt=gpt
        )
        for part in ("mtp.layers.0.", "router", "local_experts.3.", "decoder"):
            assert norm(expected, part) > 1e-6 * norm(expected), part
        for plan, (gradients, _) in zip(plans, results, strict=True):
            assert relative_error(gradients, expected) <= 1e-12, (regime, plan)


def test_loss_scaling(rank_pool, regimes):
    """grad_scale_func multiplies the MTP loss too, with and without the plugin."""
    by_hand = ByHand(model_losses)
    plan = WithPlugin(model_losses, "seq-mean-token-sum", grad_scale=1024.0)
    for regime in regimes:
        plain, scaled, with_plugin = run(
            rank_pool, "D=2 M=4", regime, [by_hand, replace(by_hand, grad_scale=1024.0), plan]
        )
        assert relative_error(scaled[0], {n: 1024 * g for n, g in plain[0].items()}) <= 1e-12
        assert relative_error(with_plugin[0], scaled[0]) <= 1e-12


@pytest.mark.parametrize("text", ["D=2 M=2", pytest.param("C=2 D=2 M=4", marks=LONG)])
def test_both_losses_add_up(rank_pool, regimes, text):
    """Gradient with the main loss minus that without it is the reference's gradient of J."""
    batch = with_units(standard_batch(Layout.parse(text)))
    plain = replace(GPT, overrides={})
    for regime in regimes:
        plans = plugin_plans(factor=1.0)
        zeroed, *results = run(rank_pool, text, regime, [replace(plans[0], factor=0.0), *plans])
        evaluated = run(rank_pool, text, regime, plans, forward_only=True)
        for index, (mode, options) in enumerate(MODES):
            [(loss, expected)] = rank_pool.run(
                reference_run, plain, batch, negative_log_probs, mode, world_size=1, **options
            )
            gradients, report = results[index]
            main = {name: gradient - zeroed[0][name] for name, gradient in gradients.items()}
            assert norm(main, "mtp.") <= 1e-6 * norm(main)
            main = {name: gradient for name, gradient in main.items() if "mtp." not in name}
            assert relative_error(main, expected) <= 1e-6, (regime, mode)
            assert report == pytest.approx(loss, rel=1e-6)
            assert evaluated[index][1] == pytest.approx(report, rel=1e-12), "forward_only"


def test_mtp_without_the_flag(rank_pool, regimes):
    """Refused exactly where the model itself gives NaN on the batch's fully masked microbatch."""
    [(gradients, _)] = run(rank_pool, "D=1 M=2", "R1", [ByHand(model_losses)])
    is_finite = all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert is_finite == ("R1" in regimes)
    if not is_finite:
        message = "mtp_num_layers with .*=False: .* gives NaN .*Set calculate_per_token_loss=True"
        with pytest.raises(RankFailure, match=message):
            run(rank_pool, "D=1 M=2", "R1", plugin_plans()[:1])
