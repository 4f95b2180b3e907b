"""Faults that users of other code reported in public, each as a small input with its right value.

Every value is the reported loss *and* the gradient that reaches the parameters, through the real
Megatron schedules, DDP and finalize_model_grads. The numbers in the names are those of the list of
reports (the public thread is in each docstring).
"""

from __future__ import annotations

import math

import pytest
import torch
from prescribed import Prescribed, assert_step, batch_of, even, run

from megatron_lossagg import agg_loss
from megatron_lossagg.testing import RankFailure

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])

F_LOSSES = [[1, 2, 3, 4], [6, 9, 9, 9], [2, 2, 9, 9], [8, 9, 9, 9]]
F_MASK = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
# mode, options, nominal value, value with valid sequences
F_VALUES = [
    ("token-mean", {}, 20 / 7, 20 / 7),
    ("seq-mean-token-sum", {}, 5.0, 20 / 3),
    ("seq-mean-token-mean", {}, 2.625, 3.5),
    (
        "seq-mean-token-sum-norm",
        {"loss_scale_factor": 4, "norm_semantics": "seq-mean"},
        1.25,
        5 / 3,
    ),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 4}, 5.0, 5.0),
]
F_LAYOUTS = [
    "D=1 M=1",
    "D=1 M=4",
    "D=2 M=2",
    "D=2 M=1",
    "C=2 M=4",
    "C=2 D=2 M=2",
    "PP=2 M=2",
    "PP=2 D=2 M=2",
    "PP=2 VPP=2 M=4",
    "PP=2 C=2 M=2",
]


def fixture_f(layout: str, *, width=4):
    from megatron_lossagg.testing.layout.layout import Layout

    parsed = Layout.parse(layout)
    pad = [0] * (width - 4)
    losses = [row + [9] * len(pad) for row in F_LOSSES]
    mask = [row + pad for row in F_MASK]
    return batch_of(losses, mask, even(4, parsed.dp, parsed.num_microbatches))


def assert_fixture_f(pool, layout, **options):
    """Every mode of the fixture's table, nominal and valid."""
    for mode, mode_options, nominal, valid in F_VALUES:
        for count, expected in (("nominal", nominal), ("valid", valid)):
            assert_step(
                pool,
                fixture_f(layout),
                layout,
                mode,
                expected,
                sequence_count=count,
                **options,
                **mode_options,
            )


@BOTH_REGIMES
@pytest.mark.parametrize("layout", F_LAYOUTS)
def test_fixture_f_in_every_layout(rank_pool, layout, per_token):
    """Property: the fixture's table, nominal and valid, whatever the layout and regime."""
    assert_fixture_f(rank_pool, layout, per_token=per_token)


@BOTH_REGIMES
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_01_microbatches_are_weighed_by_their_tokens(rank_pool, num_microbatches, per_token):
    """huggingface/transformers#34191: not 2.0 (mean of means), not 5.0 (a factor M left in)."""
    batch = batch_of([[1, 9, 9], [3, 3, 3]], [[1, 0, 0], [1, 1, 1]], even(2, 1, num_microbatches))
    layout = f"D=1 M={num_microbatches}"
    assert_step(rank_pool, batch, layout, "token-mean", 2.5, per_token=per_token)


@BOTH_REGIMES
def test_02_microbatches_are_not_weighed_by_their_samples(rank_pool, per_token):
    """verl-project/verl#5625: 20/12, not 3.0."""
    losses = [[1] * 5, [1] * 5, [5] * 5, [5] * 5]
    mask = [[1] * 5, [1] * 5, [1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
    batch = batch_of(losses, mask, even(4, 1, 2))
    assert_step(rank_pool, batch, "D=1 M=2", "token-mean", 20 / 12, per_token=per_token)


@BOTH_REGIMES
@pytest.mark.parametrize(
    "layout", ["D=1 M=1", "D=1 M=2", "D=1 M=4", "PP=2 M=2", "PP=2 M=4", "PP=2 VPP=2 M=4"]
)
@pytest.mark.parametrize("forward_only", [False, True])
def test_03_the_schedule_does_not_divide_again(rank_pool, layout, forward_only, per_token):
    """areal-project/AReaL#1273: 4.0 for every M, also forward only; not 4, 2, 1."""
    num_microbatches = int(layout[-1])
    batch = batch_of([[4]] * 4, [[1]] * 4, even(4, 1, num_microbatches))
    assert_step(
        rank_pool, batch, layout, "token-mean", 4.0, per_token=per_token, forward_only=forward_only
    )


@BOTH_REGIMES
def test_04a_an_empty_microbatch_changes_nothing(rank_pool, per_token):
    """NVIDIA/Megatron-LM#1764 (a): S3 is a microbatch of its own."""
    for mode, options, nominal, _ in F_VALUES[:4]:
        assert_step(
            rank_pool,
            fixture_f("D=1 M=4"),
            "D=1 M=4",
            mode,
            nominal,
            per_token=per_token,
            sequence_count="nominal",
            **options,
        )


@BOTH_REGIMES
def test_04b_a_context_parallel_rank_that_owns_nothing(rank_pool, per_token):
    """NVIDIA/Megatron-LM#1764 (b): mask 1,0,0,1 leaves the second rank without a token."""
    batch = batch_of([[2, 9, 9, 6]], [[1, 0, 0, 1]], even(1, 1, 1))
    assert_step(rank_pool, batch, "C=2 M=1", "token-mean", 4.0, per_token=per_token)
    plan = Prescribed("token-mean")
    stores = rank_pool.run(_stores, batch, "C=2 M=1", plan, per_token, world_size=2)
    numerators = [store[0]["loss"][0].item() for store in stores]
    assert numerators[1] == 0.0 and numerators[0] != 0.0, "cp rank 1's own share is exactly 0"


def _stores(batch, layout, plan, per_token):
    from prescribed import run_on_rank

    from megatron_lossagg.testing.layout.layout import Layout

    return run_on_rank(batch, Layout.parse(layout), plan, per_token, {})[2]


@BOTH_REGIMES
@pytest.mark.parametrize("layout", ["D=2 M=2", "C=2 M=2", "PP=2 M=2"])
def test_04c_22_a_step_without_any_valid_token(rank_pool, layout, per_token):
    """NVIDIA/Megatron-LM#1764 (c), redai-studio/Relax#285: loss 0, gradients 0, flag set."""
    dp, num_microbatches = (2 if "D=2" in layout else 1), 2
    batch = batch_of([[math.nan] * 4] * 4, [[0] * 4] * 4, even(4, dp, num_microbatches))
    for mode, options, _, _ in F_VALUES:
        gradients, reports = run(rank_pool, batch, layout, mode, per_token=per_token, **options)
        assert all(report == {"loss": 0.0, "is_empty": True} for report in reports)
        assert all(gradient == 0.0 for gradient in gradients.values())


@BOTH_REGIMES
def test_08_the_norm_mode_depends_on_nothing_but_L(rank_pool, per_token):
    """verl-project/verl#3741: 1.25 at any width, any M and any D."""
    options = {
        "loss_scale_factor": 4,
        "norm_semantics": "seq-mean",
        "sequence_count": "nominal",
    }
    for layout in ("D=1 M=1", "D=1 M=4", "D=2 M=1", "D=2 M=2"):
        for width in (4, 8):
            batch = fixture_f(layout, width=width)
            assert_step(
                rank_pool,
                batch,
                layout,
                "seq-mean-token-sum-norm",
                1.25,
                per_token=per_token,
                **options,
            )
    assert_step(
        rank_pool,
        fixture_f("D=1 M=4"),
        "D=1 M=4",
        "seq-mean-token-sum-norm",
        1.25,
        per_token=per_token,
        plan=TrimmedMicrobatches("seq-mean-token-sum-norm", tuple(options.items())),
    )


class TrimmedMicrobatches(Prescribed):
    """Each microbatch cut to its own longest mask (dynamic padding)."""

    def __call__(self, context):
        for microbatch in context.microbatches:
            width = max(1, int(microbatch["loss_mask"].sum(dim=1).max()))
            microbatch.update({k: v[:, :width].clone() for k, v in microbatch.items()})
        return super().__call__(context)


def test_08_without_L_the_plugin_refuses(rank_pool):
    """verl-project/verl#3741: no guess at a horizon."""
    with pytest.raises(RankFailure, match="needs loss_scale_factor"):
        run(rank_pool, fixture_f("D=1 M=1"), "D=1 M=1", "seq-mean-token-sum-norm")


@BOTH_REGIMES
def test_09_rows_that_only_pad_the_batch_count_nowhere(rank_pool, per_token):
    """rllm-org/rllm#508: a copied row is marked by sample_mask, or by its mask."""
    losses, right = [[1, 1]] * 3 + [[0, 0]], {"token-mean": 1, "seq-mean-token-sum": 2}
    right["seq-mean-token-mean"] = 1
    assignment = even(4, 2, 2)
    for pad_mask, sample_mask in (([1, 1], 0), ([0, 0], 0), ([0, 0], None)):
        fields = {} if sample_mask is None else {"sample_mask": [1, 1, 1, sample_mask]}
        batch = batch_of(losses, [[1, 1]] * 3 + [pad_mask], assignment, **fields)
        # Only the row that nothing marks as padding needs B to be the valid sequences.
        for count in ("valid", "nominal") if fields else ("valid",):
            for mode, expected in right.items():
                assert_step(
                    rank_pool,
                    batch,
                    "D=2 M=2",
                    mode,
                    expected,
                    per_token=per_token,
                    sequence_count=count,
                )


@BOTH_REGIMES
def test_10_a_rank_with_a_dummy_microbatch(rank_pool, per_token):
    """verl-project/verl#6176: 15/5, nobody hangs, the dummy adds exact zeros."""
    batch = batch_of([[3]] * 5 + [[9]], [[1]] * 5 + [[0]], even(6, 2, 3))
    assert_step(rank_pool, batch, "D=2 M=3", "token-mean", 3.0, per_token=per_token)


@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
def test_10_a_rank_that_plans_another_number_than_its_schedule_runs(rank_pool, planning):
    """verl-project/verl#6176: an error on every rank instead of 2.6, and no hang."""
    batch = batch_of([[3]] * 5 + [[9]], [[1]] * 5 + [[0]], even(6, 2, 3))
    plan = Prescribed("token-mean", planning=planning, num_microbatches_told=2)
    with pytest.raises(RankFailure, match="microbatches"):
        run(rank_pool, batch, "D=2 M=3", "token-mean", plan=plan)


@BOTH_REGIMES
@pytest.mark.parametrize("layout", ["D=2 M=1", "C=2 M=1", "D=1 M=2"])
def test_11_the_reported_value_is_the_optimised_one(rank_pool, layout, per_token):
    """NVIDIA/Megatron-LM#4896: 28/10, not 6.0 (a mean of ratios)."""
    if layout.startswith("C"):
        # Rank 0 of two owns tokens 0, 1, 2, 9, 10, 11 of twelve.
        batch = batch_of([[10] + [9, 9] + [2] * 9], [[1, 0, 0] + [1] * 9], even(1, 1, 1))
    else:
        rows = [[10] + [9] * 8, [2] * 9], [[1] + [0] * 8, [1] * 9]
        dp, num_microbatches = (2, 1) if layout.startswith("D=2") else (1, 2)
        batch = batch_of(*rows, even(2, dp, num_microbatches))
    assert_step(rank_pool, batch, layout, "token-mean", 2.8, per_token=per_token)


@BOTH_REGIMES
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_12_metrics_are_summed_over_microbatches(rank_pool, num_microbatches, per_token):
    """verl-project/verl#4711: the step's value is 1.0 at every M, not 1/M."""
    batch = batch_of([[1, 1]] * 4, [[1, 1]] * 4, even(4, 1, num_microbatches))
    layout = f"D=1 M={num_microbatches}"
    assert_step(rank_pool, batch, layout, "token-mean", 1.0, per_token=per_token)
    [store] = rank_pool.run(
        _stores, batch, layout, Prescribed("token-mean"), per_token, world_size=1
    )
    assert len(store) == num_microbatches
    numerators, denominators = torch.stack([entry["loss"] for entry in store]).T
    assert numerators.sum() / denominators.sum() == 1.0


@BOTH_REGIMES
def test_13_masked_values_are_selected_away(rank_pool, per_token):
    """alibaba/ROLL#444: 70 and -30, then NaN and inf, at masked positions change nothing."""
    right = [
        ("token-mean", {}, 3.0),
        ("seq-mean-token-sum", {}, 3.0),
        ("seq-mean-token-mean", {}, 3.0),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 2, "norm_semantics": "seq-mean"}, 1.5),
    ]
    for masked in ((70, -30), (math.nan, math.inf)):
        batch = batch_of([[2, masked[0]], [4, masked[1]]], [[1, 0], [1, 0]], even(2, 1, 2))
        for mode, options, expected in right:
            assert_step(rank_pool, batch, "D=1 M=2", mode, expected, per_token=per_token, **options)
    batch = batch_of([[math.nan, 1], [4, 1]], [[1, 0], [1, 0]], even(2, 1, 2))
    for mode, options, _ in right:
        gradients, reports = run(rank_pool, batch, "D=1 M=2", mode, per_token=per_token, **options)
        assert math.isnan(reports[0]["loss"]), "a NaN that counts must show"


def test_13_gradient_of_masked_token_losses_is_exactly_zero():
    """alibaba/ROLL#444: the gradient with respect to the token losses, in the drop-in too."""
    losses = torch.tensor([[2, math.nan], [4, math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 0]])
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        losses.grad = None
        value = agg_loss(losses, mask, mode)
        value.backward()
        assert value.item() == 3.0
        assert losses.grad[:, 1].tolist() == [0.0, 0.0]


@BOTH_REGIMES
@pytest.mark.parametrize("num_rows", [1, 2])
def test_15_a_sequence_mean_over_context_parallel_shards(rank_pool, num_rows, per_token):
    """verl-project/verl#7914: 10/3, not 3.5, 6.67 or 1.67."""
    batch = batch_of([[4, 4, 2, 2]] * num_rows, [[1, 1, 1, 0]] * num_rows, even(num_rows, 1, 1))
    assert_step(rank_pool, batch, "C=2 M=1", "seq-mean-token-mean", 10 / 3, per_token=per_token)


@BOTH_REGIMES
@pytest.mark.parametrize("layout", ["D=1 M=3", "C=2 M=3"])
def test_18_the_report_is_not_rescaled_with_the_loss(rank_pool, layout, per_token):
    """AMD-AGI/Primus#1079: the schedule rescales the loss in place; 6.0, not 2.0 or 4.0."""
    batch = batch_of([[6] * 4] * 3, [[1] * 4] * 3, even(3, 1, 3))
    assert_step(rank_pool, batch, layout, "token-mean", 6.0, per_token=per_token)


@BOTH_REGIMES
def test_19_tool_tokens_inside_a_response_do_not_count(rank_pool, per_token):
    """THUDM/slime#365: 3.0, not 9/5."""
    batch = batch_of([[3, 3, 7, 7, 3]], [[1, 1, 0, 0, 1]], even(1, 1, 1))
    assert_step(rank_pool, batch, "D=1 M=1", "token-mean", 3.0, per_token=per_token)


@BOTH_REGIMES
def test_22_the_count_is_the_same_with_and_without_context_parallelism(rank_pool, per_token):
    """redai-studio/Relax#285: 20/7 at C=1 and C=2, not 20/8 (empty samples clamped)."""
    for layout in ("D=1 M=4", "C=2 M=4"):
        assert_step(rank_pool, fixture_f(layout), layout, "token-mean", 20 / 7, per_token=per_token)


@pytest.mark.parametrize("per_token", [False, True], ids=["flag off", "flag on"])
def test_24_the_compensation_reads_the_flag(rank_pool, per_token):
    """modelscope/ms-swift#10150: 20/7 both times; not 40/7 with the flag on or 10/7 with it off."""
    assert_step(
        rank_pool, fixture_f("D=2 M=2"), "D=2 M=2", "token-mean", 20 / 7, per_token=per_token
    )


@BOTH_REGIMES
def test_21_nothing_is_cached_from_step_to_step(rank_pool, per_token):
    """huggingface/transformers#39659: one object, M=4, M=1, other counts: 1.0 each."""
    results = rank_pool.run(_steps_of_one_aggregator, per_token, world_size=2)
    for reported, gradients in results:
        assert reported == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)
        assert gradients == pytest.approx([1.0, 1.0, 1.0], abs=1e-6 if per_token else 1e-12)


def _steps_of_one_aggregator(per_token):
    from functools import partial

    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from prescribed import prescribed_losses

    from megatron_lossagg import LossAggregator
    from megatron_lossagg.testing.gradients import whole_model_gradient
    from megatron_lossagg.testing.layout.layout import Layout
    from megatron_lossagg.testing.model.parameter_names import unwrap
    from megatron_lossagg.testing.model.scalar_model import build_scalar_chunks

    [chunk] = build_scalar_chunks(Layout(dp=2), calculate_per_token_loss=per_token)
    config = unwrap(chunk).config
    aggregator = LossAggregator(
        prescribed_losses,
        loss_agg_mode="token-mean",
        model_config=config,
        weight_dtype=torch.float64,
    )
    dp_rank = parallel_state.get_data_parallel_rank()
    reported, gradients = [], []
    # (rows, width) of each microbatch on this rank; the last step has other counts on rank 1.
    for shapes in ([(2, 3)] * 4, [(1, 3)], [(1, 3 + 2 * dp_rank)] * 2):
        chunk.zero_grad_buffer()
        step = aggregator.begin_step(
            [{"losses": torch.ones(s).double(), "loss_mask": torch.ones(s)} for s in shapes]
        )

        def forward_step(data_iterator, model, step=step):
            microbatch = next(data_iterator)
            return model(microbatch["loss_mask"]), partial(step.loss_func, microbatch)

        store = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=step.data_iterator(1),
            model=[chunk],
            num_microbatches=step.num_microbatches,
            seq_length=3,
            micro_batch_size=1,
        )
        step.validate()
        reported.append(step.report(store)["loss"])
        gradients.append(whole_model_gradient([chunk])["scale_0"].item())
    return reported, gradients
