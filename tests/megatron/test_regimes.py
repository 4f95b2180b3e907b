"""Property: every regime, context-parallel convention, packing and unit gives the same objective.

Prescribed losses through the real schedules (`prescribed.py`): the gradient of every pipeline stage
is J, so a factor that is off by anything shows.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from prescribed import Prescribed, assert_step, batch_of, even, prescribed_losses, run
from test_public_reports import F_LAYOUTS, F_VALUES, assert_fixture_f, fixture_f

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.schedule import CP_GRADIENTS
from megatron_lossagg.testing import RankFailure, pack_rows
from megatron_lossagg.testing.run import StepPlan

# (calculate_per_token_loss, returns)
REGIMES = {
    "R1": (False, "loss"),
    "R2": (False, "loss_and_num_tokens"),
    "R3": (True, "loss_and_num_tokens"),
    "R4": (True, "loss"),
}
LONG = pytest.mark.conformance  # beyond what each regime needs: `make conformance`
EVERY_REGIME = pytest.mark.parametrize("regime", REGIMES)


@pytest.mark.parametrize("regime", ["R2", "R4"])
@pytest.mark.parametrize(
    "layout",
    [
        layout
        if layout in ("D=2 M=2", "C=2 D=2 M=2", "PP=2 VPP=2 M=4", "PP=2 C=2 M=2")
        else pytest.param(layout, marks=LONG)
        for layout in F_LAYOUTS
    ],
)
def test_fixture_f_where_a_host_forces_the_return(rank_pool, layout, regime):
    """The two regimes that are not the default, in every layout of the fixture."""
    per_token, returns = REGIMES[regime]
    assert_fixture_f(rank_pool, layout, per_token=per_token, returns=returns)


@EVERY_REGIME
@pytest.mark.parametrize("layout", ["D=1 M=1", "C=2 M=1", "C=4 M=1"])
def test_14_a_token_on_one_context_parallel_rank(rank_pool, layout, regime):
    """NVIDIA/Megatron-LM#7513: 1.0 at C = 1, 2, 4, also with three values; not 1/2 and 1/4."""
    per_token, returns = REGIMES[regime]
    batch = batch_of([[1] + [9] * 7], [[1] + [0] * 7], even(1, 1, 1))
    assert_step(rank_pool, batch, layout, "token-mean", 1.0, per_token=per_token, returns=returns)


@EVERY_REGIME
@pytest.mark.parametrize("cp_gradient", ["replicated-value", "gathered"])
@pytest.mark.parametrize(
    "layout",
    ["C=2 D=2 M=2", *(pytest.param(t, marks=LONG) for t in ("C=2 M=1", "C=4 M=1", "PP=2 C=2 M=2"))],
)
def test_07_context_parallel_conventions(rank_pool, layout, cp_gradient, regime):
    """NovaSky-AI/SkyRL#1751: gradient and reported value are J in all conventions, not C * J."""
    per_token, returns = REGIMES[regime]
    options = {"per_token": per_token, "cp_gradient": cp_gradient, "returns": returns}
    batch = fixture_f(layout, width=8)
    for mode, mode_options, _, valid in F_VALUES:
        assert_step(rank_pool, batch, layout, mode, valid, **options, **mode_options)


@EVERY_REGIME
def test_07_the_report_itself(rank_pool, regime):
    """The numbers of the report: token losses w * (1,2,3,4) on two ranks give 2.5, not 5.0."""
    per_token, returns = REGIMES[regime]
    batch = batch_of([[1, 2, 3, 4]], [[1] * 4], even(1, 1, 1))
    for cp_gradient in CP_GRADIENTS:
        options = {"per_token": per_token, "cp_gradient": cp_gradient, "returns": returns}
        assert_step(rank_pool, batch, "C=2 M=1", "token-mean", 2.5, **options)


class SlicedMasks(Prescribed):
    """Microbatches that are this context-parallel rank's part before the step is planned."""

    def __call__(self, context):
        for index, microbatch in enumerate(context.microbatches):
            context.microbatches[index] = slice_for_cp(microbatch)
        aggregator = LossAggregator(
            prescribed_losses,
            loss_agg_mode=self.loss_agg_mode,
            model_config=context.model_config,
            weight_dtype=torch.float64,
            masks_are_cp_sliced=True,
            **dict(self.options),
        )
        step = aggregator.begin_step(context.microbatches)

        def forward_step(data_iterator, model):
            microbatch = next(data_iterator)
            return model(microbatch["loss_mask"]), partial(step.loss_func, microbatch)

        def finish(store):
            step.validate()
            return {**step.report(store), "is_empty": step.is_empty}

        iterators = step.data_iterator(len(context.chunks))
        return StepPlan(forward_step, iterators, len(context.microbatches), finish)


@EVERY_REGIME
@pytest.mark.parametrize(
    "layout",
    ["C=2 D=2 M=2", *(pytest.param(text, marks=LONG) for text in ("C=2 M=4", "C=4 M=2"))],
)
def test_05_full_and_sliced_masks_give_the_same(rank_pool, layout, regime):
    """verl-project/verl#5983: counted from full masks over dp, from sliced ones over both."""
    per_token, returns = REGIMES[regime]
    batch = fixture_f(layout, width=8)
    for mode, options, nominal, valid in F_VALUES:
        for count, expected in (("nominal", nominal), ("valid", valid)):
            options = {**options, "returns": returns, "sequence_count": count}
            plan = SlicedMasks(mode, tuple(options.items()))
            assert_step(rank_pool, batch, layout, mode, expected, per_token=per_token, plan=plan)
    # The report's own numbers: 8 tokens of loss 1 give 1.0, not 0.5 or 2.0.
    ones = batch_of([[1] * 4] * 2, [[1] * 4] * 2, even(2, 2, 1))
    plan = SlicedMasks("token-mean", (("returns", returns),))
    assert_step(rank_pool, ones, "C=2 D=2 M=1", "token-mean", 1.0, per_token=per_token, plan=plan)
    assert_step(
        rank_pool, ones, "C=2 D=2 M=1", "token-mean", 1.0, per_token=per_token, returns=returns
    )


@pytest.mark.parametrize("layout", ["D=2 M=2", "D=1 M=2"])
def test_06_the_flag_that_somebody_else_turned_on(rank_pool, layout):
    """verl-project/verl#6609: with the flag on, "auto" switches."""
    for mode, options, nominal, _ in F_VALUES:
        assert_step(
            rank_pool,
            fixture_f(layout),
            layout,
            mode,
            nominal,
            per_token=True,
            sequence_count="nominal",
            **options,
        )


class Packed(Prescribed):
    """All rows of a microbatch in one packed row; the padding is part of its sequence."""

    form = "cu_seqlens"

    def __call__(self, context, **kwargs):
        options = {"form": self.form, "multiple": context.layout.width_multiple}
        for index, microbatch in enumerate(context.microbatches):
            context.microbatches[index] = pack_rows(microbatch, **options)
        return super().__call__(context, **kwargs)


class PackedWithPadding(Packed):
    """The padding lies between the sequences."""

    form = "cu_seqlens_padded"


@EVERY_REGIME
@pytest.mark.parametrize("plan_type", [Packed, PackedWithPadding])
@pytest.mark.parametrize(
    "layout",
    [
        "D=1 M=2",
        "C=2 D=2 M=1",
        *(pytest.param(text, marks=LONG) for text in ("D=1 M=1", "D=2 M=1", "C=2 M=1")),
    ],
)
def test_16_packed_sequences_are_sequences(rank_pool, layout, plan_type, regime):
    """google/tunix#1662: packing changes nothing: valid and nominal counts, every mode."""
    per_token, returns = REGIMES[regime]
    for mode, options, nominal, valid in F_VALUES:
        for count, expected in (("nominal", nominal), ("valid", valid)):
            options = {**options, "returns": returns, "sequence_count": count}
            plan = plan_type(mode, tuple(options.items()))
            assert_step(
                rank_pool, fixture_f(layout), layout, mode, expected, per_token=per_token, plan=plan
            )


@EVERY_REGIME
def test_16_the_report_itself(rank_pool, regime):
    """google/tunix#1662: S0 and S1 in one row: 4.25, 8.0 and 3.2; not 3.2 and 16.0."""
    per_token, returns = REGIMES[regime]
    batch = batch_of([[1, 2, 3, 4], [6, 9, 9, 9]], [[1, 1, 1, 1], [1, 0, 0, 0]], even(2, 1, 1))
    right = {"seq-mean-token-mean": 4.25, "seq-mean-token-sum": 8.0, "token-mean": 3.2}
    for mode, expected in right.items():
        for plan_type in (Packed, PackedWithPadding):
            plan = plan_type(mode, (("returns", returns),))
            assert_step(rank_pool, batch, "D=1 M=1", mode, expected, per_token=per_token, plan=plan)


class WithUnits(Prescribed):
    """`begin_step(..., num_units=U)` or `wrap(..., num_units=U)`."""

    def __call__(self, context):
        return super().__call__(context, num_units=2)


class PackedWithUnits(WithUnits, PackedWithPadding):
    """The same with packed microbatches: unit_ids has an entry for the empty sequence too."""


@EVERY_REGIME
@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize(
    ("layout", "plan_type"),
    [
        ("D=2 M=2", WithUnits),
        ("C=2 D=2 M=2", WithUnits),
        ("C=2 D=2 M=1", PackedWithUnits),
        *(pytest.param(t, WithUnits, marks=LONG) for t in ("D=1 M=4", "PP=2 D=2 M=2")),
    ],
)
def test_23_units_that_straddle_ranks_and_microbatches(
    rank_pool, layout, plan_type, planning, regime
):
    """radixark/miles#1929: per sample 2.0, per rollout 2.25; the unit modes differ."""
    from megatron_lossagg.testing.layout.layout import Layout

    per_token, returns = REGIMES[regime]
    parsed = Layout.parse(layout)
    assignment = even(4, parsed.dp, parsed.num_microbatches)
    first = batch_of(
        # Samples of A, B, A and a fully masked one of B.
        [[2, 2, 9, 9], [3, 9, 9, 9], [1, 1, 9, 9], [9, 9, 9, 9]],
        [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]],
        assignment,
        unit_ids=[0, 1, 0, 1],
    )
    second = batch_of(
        [[2, 2, 9, 9], [3, 9, 9, 9], [3, 9, 9, 9], [9, 9, 9, 9]],
        [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
        assignment,
        unit_ids=[0, 1, 0, 1],
    )
    for batch, mode, expected in (
        (first, "seq-mean-token-mean", 2.0),
        (first, "unit-mean-token-mean", 2.25),
        (second, "unit-mean-token-mean", 8 / 3),
        (second, "unit-mean-seq-mean-token-mean", 2.75),
        (second, "unit-mean-token-sum", 5.0),
    ):
        plan = plan_type(mode, (("returns", returns),), planning)
        if planning == "begin_step":
            assert_step(rank_pool, batch, layout, mode, expected, per_token=per_token, plan=plan)
        else:
            gradients, _ = run(rank_pool, batch, layout, mode, per_token=per_token, plan=plan)
            bound = 1e-6 if per_token else 1e-12
            assert all(abs(g - expected) <= bound * expected for g in gradients.values())


def test_23_a_unit_mode_without_units_raises(rank_pool):
    """No guess: a unit mode needs unit_ids and num_units."""
    batch = batch_of([[1, 1]], [[1, 1]], even(1, 1, 1))
    with pytest.raises(RankFailure, match="has no 'unit_ids'"):
        run(rank_pool, batch, "D=1 M=1", "unit-mean-token-mean")
    batch = batch_of([[1, 1]], [[1, 1]], even(1, 1, 1), unit_ids=[0])
    with pytest.raises(RankFailure, match="num_units must be an int"):
        run(rank_pool, batch, "D=1 M=1", "unit-mean-token-mean")


@EVERY_REGIME
def test_20_dummy_microbatches_that_fill_up_an_interleaved_schedule(rank_pool, regime):
    """verl-project/verl#1617: three real microbatches and a dummy: 3.0, as PP=1 with M=3."""
    per_token, returns = REGIMES[regime]
    real = batch_of([[3]] * 3, [[1]] * 3, even(3, 1, 3))
    filled = batch_of([[3]] * 3 + [[9]], [[1]] * 3 + [[0]], even(4, 1, 4))
    options = {"per_token": per_token, "returns": returns}
    assert_step(rank_pool, real, "D=1 M=3", "token-mean", 3.0, **options)
    assert_step(rank_pool, filled, "PP=2 VPP=2 M=4", "token-mean", 3.0, **options)
