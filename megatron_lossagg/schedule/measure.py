"""Drive a model of one number per stage through the caller's schedule, and see what arrives.

A table of what Megatron does to a loss is right until somebody patches a schedule. Here every stage
multiplies by a parameter that is 1, and each `loss_func` call returns what the plugin would for a
partial sum of 1; so the gradient of every parameter must be M * D * C (the number of calls), and
what it is instead tells the factor that is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.groups import ParallelGroups, communication_device
from megatron_lossagg.one_number_stage import StagePlace, one_number_stage
from megatron_lossagg.schedule.factors import ScheduleFactors
from megatron_lossagg.schedule.measured_ratio import MeasuredCall, check_gradients, gradient_of

# Tokens per rank and microbatch; any number would do.
_SEQ_LENGTH = 2
# Of a `ddp_config`, as Megatron-LM sets them; FSDP wrappers have some of them.
_GRADIENT_CHECKS = ("check_for_nan_in_grad", "check_for_large_grads")


@dataclass(frozen=True)
class Measurement:
    """What a returned loss met on its way to the gradient.

    Attributes:
        contract: what the config says, which the measurement confirmed.
        factor: gradient / sum of returned losses over all ranks and microbatches; the plugin's
            factor (`contract.loss_factor(num_microbatches)`) is 1 over it. In R3 the returned
            losses carry T, so it is 1/T.
        num_microbatches: M of the measured schedule call.
    """

    contract: ScheduleFactors
    factor: float
    num_microbatches: int


def measure_schedule(
    model_config: Any,
    groups: ParallelGroups,
    contract: ScheduleFactors,
    *,
    forward_backward_func: Callable[..., Any] | None = None,
    model: list[Any] | None = None,
    num_microbatches: int | None = None,
) -> Measurement:
    """Communicates over all groups, as one small training step does. Every rank must call it.

    It works on copies: the caller's config, buffers and gradients are not touched. The gradient
    checks of the caller's `ddp_config` are left out, so that it may be called before the training
    as well as in a step.

    Args:
        model_config: the model's config; its `finalize_model_grads_func` and `grad_scale_func` are
            part of what is measured.
        groups: the process groups.
        contract: what `ScheduleContract.detect` says.
        forward_backward_func: the schedule; None takes Megatron's for the current parallel state.
        model: the caller's chunks in DDP, whose wrapper and `ddp_config` are used; None takes
            Megatron's `DistributedDataParallel` with its defaults.
        num_microbatches: M of the call; None takes the number of pipeline ranks, at least 2.

    Returns:
        The factor that was found, with the contract that it confirms.

    Raises:
        LossAggError: on every rank, if the gradient is not what the contract says, or differs
            between data x context parallel ranks.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    call = MeasuredCall(contract, groups, num_microbatches or max(2, groups.pp_size))
    config = _private_config(model_config)
    chunks = [
        _wrap(config, stage_of(config, groups, vp_stage), model, vp_stage)
        for vp_stage in range(groups.num_virtual_stages)
    ]
    _run(forward_backward_func or get_forward_backward_func(), chunks, call)
    scale = 1.0
    if config.grad_scale_func is not None:
        scale = float(config.grad_scale_func(torch.ones(1)))
    gradients = [gradient_of(chunk, groups) / scale for chunk in chunks]
    check_gradients(gradients, call, config.params_dtype)
    factor = gradients[-1] / (call.returned_loss * call.num_calls)
    return Measurement(contract, factor, call.num_microbatches)


def _run(schedule: Callable[..., Any], chunks: list[Any], call: MeasuredCall) -> None:
    """Run the schedule once, forward and backward, with a partial sum of 1 per call."""

    def loss_func(output: Tensor, non_loss_data: bool = False) -> Any:
        loss = output.float().mean() * call.returned_loss
        report = {"loss": loss.detach().clone()}
        if call.factors.returns_num_tokens:
            return loss, torch.ones((), dtype=torch.int32, device=loss.device), report
        return loss, report

    def forward_step(data_iterator: Any, chunk: Any) -> Any:
        return chunk(), loss_func

    schedule(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
        model=chunks,
        num_microbatches=call.num_microbatches,
        seq_length=_SEQ_LENGTH * call.groups.cp_size * call.groups.tp_size,
        micro_batch_size=1,
        forward_only=False,
    )


def _private_config(model_config: Any) -> Any:
    """A copy without hooks into the caller's buffers, and without losses of Megatron's own."""
    config = copy.copy(model_config)
    for hook in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        setattr(config, hook, None)
    from megatron.core.distributed import finalize_model_grads

    finalize = getattr(config, "finalize_model_grads_func", None) or finalize_model_grads
    # Our own checks belong to the caller's step.
    config.finalize_model_grads_func = getattr(finalize, "finalize", finalize)
    config.hybrid_context_parallel = False  # it takes its samples from a data loader of its own
    config.num_moe_experts = None
    config.mtp_num_layers = None
    config.timers = None
    return config


def stage_of(config: Any, groups: ParallelGroups, vp_stage: int) -> Any:
    """A pipeline stage that multiplies by one parameter, which is 1; the first makes ones."""
    sequence_shards = groups.tp_size if getattr(config, "sequence_parallel", False) else 1
    length = _SEQ_LENGTH * groups.tp_size // sequence_shards
    device = communication_device(groups.dp_cp, torch.device("cpu"))

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=config.params_dtype, device=device)

    return one_number_stage(
        config,
        StagePlace(groups.pp_rank, groups.pp_size, vp_stage, groups.num_virtual_stages),
        "scale",
        ones(1),  # FSDP shards no scalars
        first_input=lambda: ones(length, 1, config.hidden_size),
    )


def _wrap(config: Any, stage: Any, model: list[Any] | None, vp_stage: int) -> Any:
    """Wrap a stage as the caller's chunks are wrapped."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wrapper, ddp_config = DistributedDataParallel, DistributedDataParallelConfig()
    if model:
        wrapper, ddp_config = type(model[0]), copy.copy(model[0].ddp_config)
        if issubclass(wrapper, DistributedDataParallel):
            ddp_config.overlap_grad_reduce = False
            ddp_config.overlap_param_gather = False
        # They ask the rerun state machine, which refuses outside of a training step and in one
        # takes the probe's gradients for the model's.
        for check in _GRADIENT_CHECKS:
            if hasattr(ddp_config, check):
                setattr(ddp_config, check, False)
    return wrapper(
        config=config, ddp_config=ddp_config, module=stage, disable_bucketing=vp_stage > 0
    )
