"""Wrappers other than DDP, and optimizers in several instances: exact, or refused by name."""

from __future__ import annotations

import pytest
import torch
from test_public_reports import fixture_f
from test_regimes import REGIMES

from megatron_lossagg import LossAggError, LossAggregator, ParallelGroups, ScheduleContract
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import set_config_hooks
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT, transformer_config
from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import Case

LONG = pytest.mark.conformance
FSDP2, MEGATRON_FSDP = "TorchFullyShardedDataParallel", "FullyShardedDataParallel"


def wrapper_and_config(kind):
    """A wrapper class of Megatron's, and a DistributedDataParallelConfig for it."""
    from megatron.core import distributed

    if kind == FSDP2:

        class Wrapper(distributed.TorchFullyShardedDataParallel):
            def finish_grad_sync(self, force_all_reduce=False):
                """0.16's finalize_model_grads passes a keyword that its own wrapper lacks."""

        return Wrapper, distributed.DistributedDataParallelConfig()
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    # The sharding strategies scale by a premultiplied sum, which only NCCL has.
    return FullyShardedDataParallel, distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="no_shard",
    )


def wrapped_stage(layout, kind, per_token):
    """One stage of one number in a wrapper, its config and the groups."""
    from megatron_lossagg.schedule.measure import stage_of

    initialize_model_parallel(layout)
    sizes = TinyGPT(num_layers=4, hidden_size=1, num_heads=1, dtype=torch.float32)
    config = transformer_config(sizes, layout, calculate_per_token_loss=per_token)
    groups = ParallelGroups.from_megatron()
    wrapper, ddp_config = wrapper_and_config(kind)
    chunk = wrapper(config=config, ddp_config=ddp_config, module=stage_of(config, groups, 0))
    set_config_hooks([chunk])
    return chunk, config, groups


def measured(text, kind, regime):
    """The factor that measuring finds, times the plugin's; or what it raises."""
    per_token, returns = REGIMES[regime]
    chunk, config, groups = wrapped_stage(Layout.parse(text), kind, per_token)
    try:
        found = ScheduleContract.measure(config, groups, returns=returns, model=[chunk])
    except LossAggError as error:
        return str(error)
    return found.factor * found.contract.loss_factor(found.num_microbatches)


@pytest.mark.parametrize("kind", [FSDP2, MEGATRON_FSDP])
@pytest.mark.parametrize("text", ["D=2 M=1", pytest.param("D=2 C=2 M=1", marks=LONG)])
def test_fsdp_without_the_per_token_flag_is_exact(rank_pool, text, kind):
    """R1 and R2: both wrappers average over data x context parallel ranks, as DDP does."""
    for regime in ("R1", "R2"):
        world_size = Layout.parse(text).world_size
        for factor in rank_pool.run(measured, text, kind, regime, world_size=world_size):
            assert factor == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("kind", [FSDP2, MEGATRON_FSDP])
def test_fsdp_with_the_per_token_flag_is_found_wrong(rank_pool, kind):
    """R3 and R4: they average where DDP sums; the measurement says by how much."""
    for regime in ("R3", "R4"):
        for message in rank_pool.run(measured, "D=2 M=1", kind, regime, world_size=2):
            assert "Measured schedule: in regime" in message


def first_step(text, kind, regime, measures):
    """One step of the real schedule; what it raises before the optimizer would step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    per_token, returns = REGIMES[regime]
    layout = Layout.parse(text)
    chunk, config, _ = wrapped_stage(layout, kind, per_token)
    aggregator = LossAggregator(
        lambda output, microbatch: output * microbatch["losses"],
        loss_agg_mode="token-mean",
        model_config=config,
        returns=returns,
    )
    if measures:
        aggregator.measure(model=[chunk])

    microbatches = fixture_f(text).microbatches(torch.distributed.get_rank())
    step = aggregator.begin_step(microbatches)

    def forward_step(data_iterator, model):
        microbatch = next(data_iterator)
        return model().mean(), lambda output: step.loss_func(microbatch, output)

    try:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=step.data_iterator(1),
            model=[chunk],
            num_microbatches=step.num_microbatches,
            seq_length=4,
            micro_batch_size=2,
            forward_only=False,
        )
    except LossAggError as error:
        return str(error)
    return "finalized"


@pytest.mark.parametrize(
    ("kind", "regime", "measures", "expected"),
    [
        (FSDP2, "R3", False, "TorchFullyShardedDataParallel (torch FSDP2) averages"),
        (FSDP2, "R4", False, "TorchFullyShardedDataParallel (torch FSDP2) averages"),
        (FSDP2, "R1", False, "finalized"),
        (MEGATRON_FSDP, "R1", False, "Megatron-FSDP is not proved"),
        (MEGATRON_FSDP, "R1", True, "finalized"),
    ],
)
def test_first_step_refuses_what_is_not_exact(rank_pool, kind, regime, measures, expected):
    """Before the gradients are reduced, and so before the optimizer, on every rank."""
    for found in rank_pool.run(first_step, "D=2 M=2", kind, regime, measures, world_size=2):
        assert found is not None and found.startswith(expected), found


@pytest.mark.parametrize(
    ("text", "regime"),
    [
        ("INST=2 D=4 M=2", "R1"),
        ("INST=2 C=2 D=2 M=2", "R3"),
        *(
            pytest.param(text, regime, marks=LONG)
            for text, regime in (
                ("INST=2 D=4 M=2", "R2"),
                ("INST=2 D=4 M=2", "R3"),
                ("INST=2 C=2 D=2 M=2", "R4"),
                ("INST=2 PP=2 D=2 M=2", "R1"),
            )
        ),
    ],
)
def test_several_optimizer_instances(rank_pool, text, regime):
    """Reduce-scatter inside an instance, all-reduce between them: D is still all ranks."""
    [result] = run_cases(rank_pool, [Case(Layout.parse(text), regime)])
    assert len(result.modes) == 6 and result.passed, result
