"""Property: options of the schedule, DDP, optimizer and model change nothing but their own part.

The plugin, with all its checks, on the real GPTModel, schedules, DDP and finalize_model_grads in
float64; the reference is one process, the whole batch, plain autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from own_losses import run_plans, set_grad_scale

from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan, policy_gradient_losses
from megatron_lossagg.verification.cases import GRADIENT_BOUNDS, LOSS_BOUND, standard_batch

PER_TOKEN = {"R1": False, "R2": False, "R3": True, "R4": True}
RETURNS = {"R1": "auto", "R2": "loss_and_num_tokens", "R3": "auto", "R4": "loss"}
LONG = pytest.mark.conformance
MODES = {
    "seq-mean-token-mean": {},
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"loss_scale_factor": 7.5},
}
# Several buckets, of which some are reduced while others are still computed.
OVERLAP = {"overlap_grad_reduce": True, "ddp_overrides": {"bucket_size": 500}}
DISTRIBUTED = {"use_distributed_optimizer": True}
RECOMPUTE = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective"},
}


@dataclass(frozen=True)
class Plan(AggregatorPlan):
    """`AggregatorPlan` on a model whose config has the loss scaling of fp16 training."""

    grad_scale: float | None = None

    def __call__(self, context):
        set_grad_scale(context, self.grad_scale)
        return super().__call__(context)


@pytest.fixture(scope="module")
def references(rank_pool):
    """(text of a layout, mode) -> (J, gradient); computed once."""
    found = {}

    def reference(text, mode):
        batch = standard_batch(Layout.parse(text))
        key = (batch.assignment, mode)
        if key not in found:
            [found[key]] = rank_pool.run(
                reference_run,
                TinyGPT(),
                batch,
                policy_gradient_losses,
                mode,
                world_size=1,
                **MODES[mode],
            )
        return found[key]

    return reference


def assert_exact(pool, references, text, regime, *, modes, grad_scale=None, gpt=None, **options):
    """Whole-model gradient, times `grad_scale`, and J as every rank reports it."""
    layout = Layout.parse(text)
    plans = [
        Plan(
            mode,
            planning=planning,
            returns=RETURNS[regime],
            grad_scale=grad_scale,
            **MODES[mode],
        )
        for mode in modes
        for planning in ("begin_step", "wrap")
    ]
    on_ranks = pool.run(
        run_plans,
        standard_batch(layout),
        layout,
        TinyGPT() if gpt is None else gpt,
        PER_TOKEN[regime],
        plans,
        world_size=layout.world_size,
        **options,
    )
    for index, plan in enumerate(plans):
        loss, expected = references(text, plan.loss_agg_mode)
        gradients = on_ranks[0][index][0]
        if options.get("forward_only"):
            assert gradients is None
        else:
            scaled = {name: gradient * (grad_scale or 1) for name, gradient in expected.items()}
            assert relative_error(gradients, scaled) <= GRADIENT_BOUNDS[regime], plan
        reported = [rank[index][1] for rank in on_ranks]
        values = [report["loss"] for report in reported if "loss" in report]
        assert values and all(abs(v - loss) <= LOSS_BOUND * abs(loss) for v in values), plan


def options_of(*short, long=()):
    """Parameters (text, regime): `short` in all regimes, `long` in R1 and R3 by turns."""
    default = [(text, regime) for text in short for regime in ("R1", "R3")]
    others = [(text, regime) for text in short for regime in ("R2", "R4")]
    others += [(text, ("R1", "R3")[index % 2]) for index, text in enumerate(long)]
    marked = [pytest.param(*case, marks=LONG) for case in others]
    return pytest.mark.parametrize(("text", "regime"), [*default, *marked])


ALL_LAYOUTS = ("C=2 D=2 M=2", "PP=2 VPP=2 D=2 M=4")


def modes_of(request):
    """One mode, or all of them in the long matrix."""
    return list(MODES) if request.node.get_closest_marker("conformance") else list(MODES)[:1]


@options_of("PP=2 D=2 M=2", long=ALL_LAYOUTS)
def test_loss_scaling(rank_pool, references, request, text, regime):
    """grad_scale_func: gradients are 1024 times as large, the report is not."""
    assert_exact(rank_pool, references, text, regime, modes=modes_of(request), grad_scale=1024.0)


@options_of("PP=2 D=2 M=2", long=ALL_LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [OVERLAP, DISTRIBUTED, {**OVERLAP, **DISTRIBUTED}],
    ids=["overlap_grad_reduce", "distributed_optimizer", "both"],
)
def test_ddp_options(rank_pool, references, request, text, regime, options):
    """Buckets reduced during the backward passes, and a shard of the gradient on each rank."""
    assert_exact(rank_pool, references, text, regime, modes=modes_of(request), **options)


@options_of("PP=2 D=2 M=2", long=("PP=4 M=4", "TP=2 PP=2 M=4"))
@pytest.mark.parametrize("deallocate", [True, False])
def test_deallocated_outputs(rank_pool, references, request, text, regime, deallocate):
    """Outputs that the schedule frees once they are sent."""
    gpt = TinyGPT(overrides={"deallocate_pipeline_outputs": deallocate})
    assert_exact(rank_pool, references, text, regime, modes=modes_of(request), gpt=gpt)


@options_of("PP=2 D=2 M=2", long=ALL_LAYOUTS)
@pytest.mark.parametrize("granularity", RECOMPUTE)
def test_activation_recompute(rank_pool, references, request, text, regime, granularity):
    """Layers, or attention alone, that run their forward pass again in the backward pass."""
    gpt = TinyGPT(overrides=RECOMPUTE[granularity])
    assert_exact(rank_pool, references, text, regime, modes=modes_of(request), gpt=gpt)


class Counting(Plan):
    """Reports how often attention ran on this rank, in backward passes too."""

    def __call__(self, context):
        plan, calls = super().__call__(context), []
        hooks = [
            module.register_forward_pre_hook(lambda *args: calls.append(args))
            for chunk in context.chunks
            for name, module in chunk.named_modules()
            if name.endswith("core_attention")
        ]

        def finish(store):
            for hook in hooks:
                hook.remove()
            return len(calls)

        return replace(plan, finish=finish)


def test_recompute_is_on(rank_pool):
    """The options above do run layers twice: 2 layers a stage and 2 microbatches are 4 calls."""
    layout = Layout.parse("PP=2 D=2 M=2")
    for overrides, num_calls in (({}, 4), *((o, 8) for o in RECOMPUTE.values())):
        gpt = TinyGPT(overrides=overrides)
        plans = [Counting("token-mean")]
        results = rank_pool.run(run_plans, standard_batch(layout), layout, gpt, False, plans)
        assert [report for [(_, report)] in results] == [num_calls] * 4


@options_of("PP=2 D=2 M=2", long=ALL_LAYOUTS)
def test_forward_only(rank_pool, references, request, text, regime):
    """Evaluation reports the same J."""
    assert_exact(rank_pool, references, text, regime, modes=modes_of(request), forward_only=True)
