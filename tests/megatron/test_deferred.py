"""Property: with `denominators="deferred"` the gradient is that of the complete global batch.

The same whole-model comparison as `test_exactness`, but nothing is counted before the schedule has
taken its last microbatch: the wrapped iterator is a stream that would notice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from prescribed import even, prescribed_losses, run
from test_public_reports import F_VALUES, fixture_f

from megatron_lossagg import LossAggError, LossAggregator
from megatron_lossagg.testing import RankFailure, TinyGPT
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.run import StepPlan, run_global_batch
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import DEFAULT_MODES, Case, standard_batch

LONG = pytest.mark.conformance
MODES = {
    label: replace(plan, denominators="deferred", planning="wrap")
    for label, plan in DEFAULT_MODES.items()
}
DEFAULT = [("D=2 M=2", "R1"), ("PP=2 D=2 M=4", "R3"), ("C=2 D=2 M=2", "R1"), ("D=2 M=2", "R3")]
LAYOUTS = ("PP=2 VPP=2 C=2 M=4", "TP=2 PP=2 M=4", "D=4 M=4", "C=4 M=2")
OTHERS = [
    *((text, regime) for text in ("PP=2 D=2 M=4", "C=2 D=2 M=2") for regime in ("R2", "R4")),
    *zip(LAYOUTS, ("R1", "R2", "R3", "R4"), strict=True),
    *zip(LAYOUTS, ("R3", "R4", "R1", "R2"), strict=True),
]


@pytest.mark.parametrize(
    ("text", "regime"), [*DEFAULT, *(pytest.param(*case, marks=LONG) for case in OTHERS)]
)
def test_every_mode(rank_pool, text, regime):
    """Whole-model gradient and the reported loss of every mode, in every regime."""
    [result] = run_cases(rank_pool, [Case(Layout.parse(text), regime, "wrap")], MODES)
    assert len(result.modes) == 6 and result.passed, result


@pytest.mark.parametrize("regime", ["R1", "R3"])
def test_data_on_tensor_parallel_rank_0_alone(rank_pool, regime):
    """Counts reach ranks and stages without data: all of them scale their gradients."""
    case = Case(Layout.parse("TP=2 PP=2 M=4"), regime, "wrap", "tp-rank-0")
    [result] = run_cases(rank_pool, [case], MODES)
    assert result.passed, result


def test_nominal_sequences(rank_pool):
    """B of all rows is known at the end as well."""
    modes = {label: replace(plan, sequence_count="nominal") for label, plan in MODES.items()}
    [result] = run_cases(rank_pool, [Case(Layout.parse("D=2 M=2"), "R1", "wrap")], modes)
    assert result.passed, result


@dataclass(frozen=True)
class Streaming:
    """A plan whose data iterator records how far the loss had come when it was asked for more."""

    loss_agg_mode: str
    options: tuple = ()

    def __call__(self, context):
        aggregator = LossAggregator(
            prescribed_losses,
            loss_agg_mode=self.loss_agg_mode,
            model_config=context.model_config,
            weight_dtype=torch.float64,
            denominators="deferred",
            report_counts=True,
            **dict(self.options),
        )
        losses_seen = []
        asked_after = []

        def stream():
            for microbatch in context.microbatches:
                asked_after.append(len(losses_seen))
                yield microbatch

        data = aggregator.wrap(stream(), num_microbatches=len(context.microbatches))

        def forward_step(data_iterator, model):
            microbatch = next(data_iterator)
            losses_seen.append(1)
            return model(microbatch["loss_mask"]), partial(aggregator.loss_func, microbatch)

        def finish(store):
            pairs = torch.stack([entry["loss"] for entry in store]).sum(dim=0)
            torch.distributed.all_reduce(pairs)
            return {
                "asked_after": asked_after,
                "loss": (pairs[0] / pairs[1]).item(),
                "num_tokens": aggregator.report(store)["num_tokens"],
            }

        return StepPlan(forward_step, data, len(context.microbatches), finish)


@pytest.mark.parametrize("per_token", [False, True])
def test_microbatches_are_taken_one_by_one(rank_pool, per_token):
    """The second microbatch is asked for after the first was used: it need not exist before."""
    for mode, options, _, valid in F_VALUES:
        if per_token and mode == "token-mean":
            continue  # Megatron's own division: the plugin learns no counts
        plan = Streaming(mode, tuple(options.items()))
        gradients, reports = run(
            rank_pool, fixture_f("D=2 M=2"), "D=2 M=2", mode, per_token=per_token, plan=plan
        )
        for report in reports:
            assert report["asked_after"] == [0, 1]
            assert report["num_tokens"] == 7
            assert abs(report["loss"] - valid) <= 1e-12 * abs(valid)
        for gradient in gradients.values():
            assert abs(gradient - valid) <= (1e-6 if per_token else 1e-12) * abs(valid)


def test_an_empty_batch_has_no_gradient(rank_pool):
    """N = 0: the gradient is 0, not NaN."""
    batch = fixture_f("D=2 M=2")
    batch = type(batch)({**batch.rows, "loss_mask": torch.zeros(4, 4)}, even(4, 2, 2))
    plan = Streaming("seq-mean-token-mean")
    gradients, _ = run(rank_pool, batch, "D=2 M=2", "seq-mean-token-mean", plan=plan)
    assert list(gradients.values()) == [0.0]


def test_evaluation_is_refused(rank_pool):
    """Nothing divides in a forward-only run: a value without its denominator is never reported."""
    with pytest.raises(RankFailure, match="Evaluate with another LossAggregator"):
        run(
            rank_pool,
            fixture_f("D=2 M=2"),
            "D=2 M=2",
            "seq-mean-token-sum",
            plan=Streaming("seq-mean-token-sum"),
            forward_only=True,
        )


def _refusal(layout, gpt_overrides, options):
    """The message that a deferred step is refused with on this rank."""
    gpt = TinyGPT(overrides=gpt_overrides)

    def plan(context):
        aggregator = LossAggregator(
            prescribed_losses,
            model_config=context.model_config,
            denominators="deferred",
            **options,
        )
        next(aggregator.wrap(iter(context.microbatches), num_microbatches=1))
        raise AssertionError("was not refused")

    try:
        run_global_batch(standard_batch(layout), layout, plan, gpt=gpt)
    except LossAggError as error:
        return str(error)


MOE = {"num_moe_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 32}


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (MOE, {"loss_agg_mode": "seq-mean-token-sum"}, "num_moe_experts set would divide"),
        ({}, {"loss_agg_mode": "unit-mean-token-mean"}, "not known up to one common divisor"),
        (
            {},
            {"loss_agg_mode": "token-mean", "masks_are_cp_sliced": True},
            "cannot be counted from parts",
        ),
    ],
)
def test_what_one_division_cannot_do_is_refused(rank_pool, overrides, options, message):
    """MoE losses would be divided too, unit counts are no common divisor, parts count nothing."""
    [found] = rank_pool.run(_refusal, Layout.parse("D=1 M=1"), overrides, options, world_size=1)
    assert message in found
