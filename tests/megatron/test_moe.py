"""Property: the plugin leaves the auxiliary losses of MoE routers alone, and counts its own right.

Real MoE layers, top-2 of 4 experts, with expert parallelism. Megatron's auxiliary loss belongs to a
microbatch and rank, so it is compared with that of a `loss_func` by hand; the gradient of the main
loss is compared with plain autograd in one process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from own_losses import MODES, ByHand, WithPlugin, deferred, norm, run_plans, with_units

from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg.verification.aggregator_plan import policy_gradient_losses
from megatron_lossagg.verification.cases import GRADIENT_BOUNDS, standard_batch

PER_TOKEN = {"R1": False, "R3": True}
BOTH_REGIMES = pytest.mark.parametrize("regime", PER_TOKEN)
LONG = pytest.mark.conformance
# Nothing but the losses differs, so sums are in one order.
SAME = 1e-12
BY_HAND = ByHand(policy_gradient_losses)


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
            "moe_aux_loss_coeff": 0.5 if balancing != "none" else 0.0,
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
    batch, per_token = with_units(standard_batch(layout)), PER_TOKEN[regime]
    return pool.run(
        run_plans, batch, layout, gpt, per_token, plans, world_size=layout.world_size, **options
    )[0]


def assert_same(plans, results, expected):
    """Every plan leaves this gradient, which reaches routers, experts of all ranks and below."""
    for part in ("router", "local_experts.0.", "local_experts.3.", "embedding"):
        assert norm(expected, part) > 1e-6 * norm(expected), part
    for plan, (gradients, _) in zip(plans, results, strict=True):
        assert relative_error(gradients, expected) <= SAME, plan


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
                "EP=2 C=2 M=1",
                "EP=4 D=4 M=1",
                "EP=2 PP=2 D=2 M=4",
                "EP=2 TP=2 SP=1 D=2 M=4",
            )
        ),
    ],
)
def test_auxiliary_losses_are_the_same_with_the_plugin(rank_pool, text, regime):
    """Main loss zeroed: every mode leaves the gradient of a loss_func by hand."""
    plans = [*plugin_plans(), WithPlugin(policy_gradient_losses, "token-sum", planning="wrap")]
    if regime == "R3":
        plans.append(deferred(policy_gradient_losses))
    (expected, _), *results = run(rank_pool, text, moe_gpt(), regime, [BY_HAND, *plans])
    assert_same(plans, results, expected)


@LONG
@BOTH_REGIMES
@pytest.mark.parametrize("balancing", ["seq_aux_loss", "global_aux_loss"])
def test_other_auxiliary_losses(rank_pool, balancing, regime):
    """Those that balance a sequence, or the ranks together."""
    gpt, text = moe_gpt(balancing), "EP=2 C=2 D=2 M=4"
    (expected, _), *results = run(rank_pool, text, gpt, regime, [BY_HAND, *plugin_plans()])
    assert_same(plugin_plans(), results, expected)


@BOTH_REGIMES
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"overlap_grad_reduce": True}, marks=LONG),
        pytest.param({"use_distributed_optimizer": True}, marks=LONG),
    ],
    ids=["plain", "overlap_grad_reduce", "distributed_optimizer"],
)
def test_loss_scaling(rank_pool, options, regime):
    """grad_scale_func multiplies the auxiliary losses too, with and without the plugin."""
    plans = plugin_plans(grad_scale=1024.0)[2:4]
    scaled_by_hand = replace(BY_HAND, grad_scale=1024.0)
    (expected, _), (scaled, _), *results = run(
        rank_pool, "EP=2 D=2 M=4", moe_gpt(), regime, [BY_HAND, scaled_by_hand, *plans], **options
    )
    assert relative_error(scaled, {n: 1024 * g for n, g in expected.items()}) <= SAME
    assert_same(plans, results, scaled)


@BOTH_REGIMES
@pytest.mark.parametrize(
    "text",
    ["EP=2 D=2 M=2", *(pytest.param(t, marks=LONG) for t in ("EP=2 C=2 D=2 M=4", "EP=2 D=4 M=1"))],
)
def test_both_losses_add_up(rank_pool, text, regime):
    """Gradient with the main loss minus that without it is the reference's gradient of J.

    One layer, since Megatron's router takes its softmax in float32: over two, gradients add up to
    1e-7 only.
    """
    batch = with_units(standard_batch(Layout.parse(text)))
    gpt, plain_gpt = moe_gpt(num_layers=1), moe_gpt("none", num_layers=1)
    plans = plugin_plans(factor=1.0)
    zeroed, *results = run(rank_pool, text, gpt, regime, [replace(plans[0], factor=0.0), *plans])
    evaluated = run(rank_pool, text, gpt, regime, plans, forward_only=True)
    for index, (mode, options) in enumerate(MODES):
        [(loss, expected)] = rank_pool.run(
            reference_run,
            plain_gpt,
            batch,
            policy_gradient_losses,
            mode,
            world_size=1,
            **options,
        )
        gradients, report = results[index]
        main = {name: gradient - zeroed[0][name] for name, gradient in gradients.items()}
        assert norm(main, "experts") > 0.01 * norm(main)
        assert relative_error(main, expected) <= GRADIENT_BOUNDS[regime], mode
        assert report == pytest.approx(loss, rel=1e-12)
        assert evaluated[index][1] == pytest.approx(loss, rel=1e-12), "forward_only"
