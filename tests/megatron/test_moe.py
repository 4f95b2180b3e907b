"""Property: the plugin leaves the auxiliary losses of MoE routers alone, and counts its own right.

Real MoE layers, top-2 of 4 experts, with expert parallelism. Megatron's auxiliary loss belongs to a
microbatch and rank, so it is compared with that of a `loss_func` by hand; the gradient of the main
loss is compared with plain autograd in one process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from own_losses import MODES, ByHand, WithPlugin, norm, run_plans, with_units

from megatron_lossagg.testing.aggregator_plan import policy_gradient_losses
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout import Layout
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg.testing.tiny_gpt import TinyGPT
from megatron_lossagg.testing.verification import GRADIENT_BOUNDS, standard_batch

PER_TOKEN = {"R1": False, "R3": True}
BOTH_REGIMES = pytest.mark.parametrize("regime", PER_TOKEN)
LONG = pytest.mark.conformance
# The tolerance is for the order of sums, which is the same: nothing but the losses differs.
SAME = 1e-12


def moe_gpt(balancing="aux_loss", num_layers=2):
    return TinyGPT(
        num_layers=num_layers,
        overrides={
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "add_bias_linear": False,
            "moe_router_dtype": "fp64",
            "moe_router_load_balancing_type": balancing,
            "moe_aux_loss_coeff": 0.5 if balancing == "aux_loss" else 0.0,
        },
    )


def plugin_plans(**fields):
    return [
        WithPlugin(policy_gradient_losses, mode, tuple(options.items()), **fields)
        for mode, options in MODES
    ]


def run(pool, text, gpt, regime, plans, **options):
    """(gradient of the whole model, report) of every plan, from rank 0."""
    layout = Layout.parse(text)
    batch = with_units(standard_batch(layout))
    return pool.run(
        run_plans,
        batch,
        layout,
        gpt,
        PER_TOKEN[regime],
        plans,
        world_size=layout.world_size,
        **options,
    )[0]


def assert_same_own_losses(pool, text, gpt, regime, plans, by_hand, **options):
    """Every plan leaves the gradient that the loss_func by hand leaves, which is not zero."""
    (expected, _), *results = run(pool, text, gpt, regime, [by_hand, *plans], **options)
    for part in ("router", "experts.local_experts.0.", "experts.local_experts.3.", "embedding"):
        assert norm(expected, part) > 1e-6 * norm(expected), part
    for plan, (gradients, _) in zip(plans, results, strict=True):
        assert relative_error(gradients, expected) <= SAME, plan
    return expected


@BOTH_REGIMES
@pytest.mark.parametrize(
    "text",
    [
        "EP=2 C=2 M=4",
        *(
            pytest.param(text, marks=LONG)
            for text in (
                "EP=2 D=2 M=1",
                "EP=2 D=2 M=4",
                "EP=2 C=2 D=2 M=1",
                "EP=2 C=2 D=2 M=4",
                "EP=2 C=2 M=1",
                "EP=4 D=4 M=1",
                "EP=2 D=4 M=4",
                "EP=2 PP=2 D=2 M=4",
                "EP=2 TP=2 SP=1 D=2 M=4",
                "D=2 M=4",
                "C=2 M=4",
            )
        ),
    ],
)
def test_auxiliary_losses_are_the_same_with_the_plugin(rank_pool, text, regime):
    """Main loss zeroed: every mode leaves the gradient of a loss_func by hand."""
    by_hand = ByHand(policy_gradient_losses)
    assert_same_own_losses(rank_pool, text, moe_gpt(), regime, plugin_plans(), by_hand)


@BOTH_REGIMES
@pytest.mark.parametrize("text", ["EP=2 D=2 M=2", pytest.param("EP=2 C=2 D=2 M=4", marks=LONG)])
def test_both_losses_add_up(rank_pool, text, regime):
    """Gradient with the main loss minus that without it is the reference's gradient of J.

    One layer, since Megatron's router takes its softmax in float32: over two, gradients add up to
    1e-7 only.
    """
    layout = Layout.parse(text)
    batch = with_units(standard_batch(layout))
    plans = plugin_plans(factor=1.0)
    zeroed, *results = run(
        rank_pool, text, moe_gpt(num_layers=1), regime, [replace(plans[0], factor=0.0), *plans]
    )
    for (mode, options), (gradients, report) in zip(MODES, results, strict=True):
        [(loss, expected)] = rank_pool.run(
            reference_run,
            moe_gpt("none", num_layers=1),
            batch,
            policy_gradient_losses,
            mode,
            world_size=1,
            **options,
        )
        main = {name: gradient - zeroed[0][name] for name, gradient in gradients.items()}
        assert norm(main, "experts") > 0.01 * norm(main)
        assert relative_error(main, expected) <= GRADIENT_BOUNDS[regime], mode
        assert report == pytest.approx(loss, rel=1e-12)
