"""Property: `measure` confirms `detect` on the real schedules, and catches one that is patched."""

from __future__ import annotations

from copy import copy
from unittest import mock

import pytest
import torch
from test_regimes import REGIMES

from megatron_lossagg import LossAggError, LossAggregator, ParallelGroups, ScheduleContract
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import build_model_chunks
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT

LAYOUTS = [
    "D=1 M=1",
    "D=2 M=1",
    "TP=2 SP=1 M=1",
    "C=2 D=2 M=1",
    "PP=2 D=2 M=1",
    pytest.param("PP=4 M=1", marks=pytest.mark.conformance),
    pytest.param("PP=2 VPP=2 M=2", marks=pytest.mark.conformance),
    "PP=2 VPP=2 C=2 M=2",
]


def chunks_of(layout, per_token, **options):
    return build_model_chunks(
        TinyGPT(), Layout.parse(layout), calculate_per_token_loss=per_token, **options
    )


def measured(layout, regime, cp_gradient="local", **options):
    per_token, returns = REGIMES[regime]
    chunks = chunks_of(layout, per_token, **options)
    before = [p.main_grad.clone() for chunk in chunks for p in chunk.parameters()]
    ddp_configs = [copy(chunk.ddp_config) for chunk in chunks]
    groups = ParallelGroups.from_megatron()
    found = ScheduleContract.measure(
        unwrap(chunks[0]).config, groups, returns=returns, cp_gradient=cp_gradient, model=chunks
    )
    after = [p.main_grad for chunk in chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [chunk.ddp_config for chunk in chunks] == ddp_configs
    num_tokens = found.num_microbatches * groups.dp_cp_size
    expected = 1 / found.contract.loss_factor(found.num_microbatches)
    if regime == "R3":
        expected = 1 / num_tokens
    return found.contract.regime, found.factor, expected


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_measure_confirms_detect(rank_pool, layout, regime):
    """The factor is 1 over what `loss_func` multiplies by (R3: 1/T); gradients stay."""
    for found, factor, expected in rank_pool.run(
        measured, layout, regime, world_size=Layout.parse(layout).world_size
    ):
        assert found == regime
        assert factor == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("regime", REGIMES)
def test_measure_with_the_distributed_optimizer(rank_pool, regime):
    """`main_grad` is valid on the owning shard only; it is read there."""
    for _, factor, expected in rank_pool.run(
        measured, "PP=2 D=2 M=1", regime, use_distributed_optimizer=True, world_size=4
    ):
        assert factor == pytest.approx(expected, rel=1e-6)


def measured_under_the_rerun_machine(layout, regime):
    """Where Megatron-LM has built its model and not begun to train: its DDP checks gradients."""
    from megatron.core import rerun_state_machine as rerun

    checks = {"check_for_nan_in_grad": True, "check_for_large_grads": True}
    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    try:
        return measured(layout, regime, ddp_overrides=checks)
    finally:
        rerun.destroy_rerun_state_machine()


@pytest.mark.parametrize("regime", ["R1", "R3"])
@pytest.mark.parametrize("layout", ["D=2 M=1", "PP=2 VPP=2 C=2 M=2"])
def test_gradient_checks_of_the_callers_ddp_stay_out_of_it(rank_pool, layout, regime):
    """Megatron's checks assert that a step of its training loop is running."""
    for found, factor, expected in rank_pool.run(
        measured_under_the_rerun_machine,
        layout,
        regime,
        world_size=Layout.parse(layout).world_size,
    ):
        assert found == regime
        assert factor == pytest.approx(expected, rel=1e-6)


def patched(fault):
    """A schedule, DDP or finalize that scales differently; what measuring says about it."""
    from megatron.core.pipeline_parallel import schedules

    chunks = chunks_of("PP=2 D=2 M=1", False)
    config = unwrap(chunks[0]).config
    groups = ParallelGroups.from_megatron()
    options = {}
    if fault == "schedule forgets num_microbatches":
        original = schedules.forward_step_calc_loss

        def calc_loss(*args, **kwargs):
            position = 6
            args = list(args)
            args[position] = 1
            return original(*args, **kwargs)

        with mock.patch.object(schedules, "forward_step_calc_loss", calc_loss):
            return message_of(config, groups, options)
    if fault == "finalize divides by the data-parallel size":
        original = config.finalize_model_grads_func

        def finalize(model, *args, **kwargs):
            original(model, *args, **kwargs)
            for chunk in model:
                chunk.scale_gradients(1 / groups.dp_size)

        config.finalize_model_grads_func = finalize
        return message_of(config, groups, options)
    raise AssertionError(fault)


def message_of(config, groups, options):
    detected = ScheduleContract.detect(config, groups)
    try:
        ScheduleContract.measure(config, groups, **options)
    except LossAggError as error:
        return detected.regime, str(error)
    return detected.regime, ""


@pytest.mark.parametrize(
    ("fault", "ratio", "explanation"),
    [
        ("schedule forgets num_microbatches", "2 times", "x num_microbatches"),
        ("finalize divides by the data-parallel size", "0.5 times", "/ data-parallel size"),
    ],
)
def test_a_patched_schedule_is_caught_and_named(rank_pool, fault, ratio, explanation):
    """`detect` cannot see it; `measure` raises on every rank, with the factor that explains it."""
    for regime, message in rank_pool.run(patched, fault, world_size=4):
        assert regime == "R1"
        assert ratio in message and explanation in message


def measuring_aggregator():
    chunks = chunks_of("PP=2 D=2 M=2", False)
    config = unwrap(chunks[0]).config
    original = config.finalize_model_grads_func

    def make():
        return LossAggregator(
            lambda output, batch: output,
            loss_agg_mode="token-mean",
            model_config=config,
            contract="measure",
        )

    sound = make()
    must_before = sound.must_measure
    sound.begin_step([{"loss_mask": torch.ones(1, 4)}] * 2)

    def finalize(model, *args, **kwargs):
        original(model, *args, **kwargs)
        for chunk in model:
            chunk.scale_gradients(3.0)

    config.finalize_model_grads_func = finalize
    try:
        make().begin_step([{"loss_mask": torch.ones(1, 4)}] * 2)
    except LossAggError as error:
        return must_before, sound.must_measure, str(error)
    return must_before, sound.must_measure, ""


def test_the_aggregator_measures_before_its_first_step(rank_pool):
    """contract="measure": once, and a schedule that scales differently is refused."""
    for before, after, message in rank_pool.run(measuring_aggregator, world_size=4):
        assert (before, after) == (True, False)
        assert "3 times as large as it should" in message and "none of the sizes" in message
