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
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, communication_device
from megatron_lossagg.schedule.contract import ScheduleContract


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

    contract: ScheduleContract
    factor: float
    num_microbatches: int


def measure_schedule(
    model_config: Any,
    groups: ParallelGroups,
    contract: ScheduleContract,
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

    Raises:
        LossAggError: on every rank, if the gradient is not what the contract says, or differs
            between data x context parallel ranks.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    num_microbatches = num_microbatches or max(2, groups.pp_size)
    schedule = forward_backward_func or get_forward_backward_func()
    config = _private_config(model_config)
    chunks = [
        _wrap(config, stage_of(config, groups, vp_stage), model, vp_stage)
        for vp_stage in range(groups.num_virtual_stages)
    ]
    num_calls = num_microbatches * groups.dp_size * groups.cp_size
    returned = contract.loss_factor(num_microbatches)
    if contract.weights_carry_num_tokens:
        returned *= num_calls  # one token per call, so T is the number of calls

    def loss_func(output: Tensor, non_loss_data: bool = False) -> Any:
        loss = output.float().mean() * returned
        report = {"loss": loss.detach().clone()}
        if contract.returns_num_tokens:
            return loss, torch.ones((), dtype=torch.int32, device=loss.device), report
        return loss, report

    def forward_step(data_iterator: Any, chunk: Any) -> Any:
        return chunk(), loss_func

    schedule(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=_SEQ_LENGTH * groups.cp_size * groups.tp_size,
        micro_batch_size=1,
        forward_only=False,
    )
    scale = 1.0
    if config.grad_scale_func is not None:
        scale = float(config.grad_scale_func(torch.ones(1)))
    gradients = [_gradient(chunk, groups) / scale for chunk in chunks]
    _raise_unless_exact(gradients, num_calls, contract, num_microbatches, groups, config)
    factor = gradients[-1] / (returned * num_calls)
    return Measurement(contract, factor, num_microbatches)


# Tokens per rank and microbatch; any number would do.
_SEQ_LENGTH = 2
# Of a `ddp_config`, as Megatron-LM sets them; FSDP wrappers have some of them.
_GRADIENT_CHECKS = ("check_for_nan_in_grad", "check_for_large_grads")


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
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    pp_rank = groups.pp_rank
    stage = vp_stage * groups.pp_size + pp_rank
    sequence_shards = groups.tp_size if getattr(config, "sequence_parallel", False) else 1
    length = _SEQ_LENGTH * groups.tp_size // sequence_shards
    device = communication_device(groups.dp_cp, torch.device("cpu"))

    class OneNumberStage(MegatronModule):
        """Input (or ones) times a number."""

        def __init__(self) -> None:
            super().__init__(config=config)
            self.model_type = ModelType.encoder_or_decoder
            self.share_embeddings_and_output_weights = False
            self.pre_process = stage == 0
            self.post_process = stage == groups.pp_size * groups.num_virtual_stages - 1
            self.vp_stage = vp_stage if groups.num_virtual_stages > 1 else None
            self.input_tensor: Tensor | None = None
            self.scale = torch.nn.Parameter(
                torch.ones(1, dtype=config.params_dtype, device=device)  # FSDP shards no scalars
            )

        def set_input_tensor(self, input_tensor: Any) -> None:
            """What the schedule received from the stage before."""
            self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

        def forward(self) -> Tensor:
            """[s, b, h], what Megatron's pipeline carries."""
            if self.pre_process:
                shape = (length, 1, config.hidden_size)
                ones = torch.ones(shape, dtype=config.params_dtype, device=device)
                return ones * self.scale
            assert self.input_tensor is not None
            return self.input_tensor * self.scale

    return OneNumberStage()


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


def _gradient(chunk: Any, groups: ParallelGroups) -> float:
    """The parameter's gradient: a broadcast over dp x cp from the rank that owns it.

    With the distributed optimizer only the owner of the first shard has it reduced; otherwise all
    ranks have it, and NaN is returned if they differ.
    """
    [parameter] = chunk.parameters()
    # DDP empties `grad` into `main_grad`; FSDP wrappers leave it, as a sharded DTensor.
    found = parameter.main_grad if parameter.grad is None else parameter.grad
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    gradient = found.detach().double().reshape(1).clone()
    if groups.dp_cp_size == 1:
        return gradient.item()
    gathered = [torch.empty_like(gradient) for _ in range(groups.dp_cp_size)]
    dist.all_gather(gathered, gradient, group=groups.dp_cp)
    values = [value.item() for value in gathered]
    if chunk.ddp_config.use_distributed_optimizer and parameter.grad is None:
        return values[0]
    return values[0] if all(value == values[0] for value in values) else float("nan")


def _raise_unless_exact(
    gradients: list[float],
    expected: int,
    contract: ScheduleContract,
    num_microbatches: int,
    groups: ParallelGroups,
    config: Any,
) -> None:
    """Raise on every rank of the pipeline if one stage's gradient is off."""
    tolerance = max(4 * torch.finfo(config.params_dtype).eps, 1e-6)
    ratios = [gradient / expected / contract.undo_cp_gather for gradient in gradients]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1) if ratio == ratio else float("inf"))
    box = torch.tensor([worst], dtype=torch.float64)
    if groups.pp_size > 1:
        box = box.to(communication_device(groups.pp, box.device))
        everyones = [torch.empty_like(box) for _ in range(groups.pp_size)]
        dist.all_gather(everyones, box, group=groups.pp)
        values = [value.item() for value in everyones]
        worst = max(values, key=lambda ratio: abs(ratio - 1) if ratio == ratio else float("inf"))
    if not abs(worst - 1) <= tolerance:
        if worst != worst:
            raise LossAggError(
                "Measured schedule: data x context parallel ranks end with different gradients in "
                f"regime {contract.regime}. Do not train with it; check finalize_model_grads_func "
                "and the groups it reduces over."
            )
        raise LossAggError(
            f"Measured schedule: in regime {contract.regime} a gradient arrives {worst:.6g} times "
            f"as large as it should (num_microbatches={num_microbatches}, data-parallel size "
            f"{groups.dp_size}, context-parallel size {groups.cp_size}). The schedule, DDP or "
            "finalize_model_grads_func does not scale as Megatron-Core's own; factors that would "
            f"explain it: {_explanations(worst, num_microbatches, groups)}."
        )


def _explanations(ratio: float, num_microbatches: int, groups: ParallelGroups) -> str:
    """Products of the sizes that equal the ratio."""
    sizes = {
        "num_microbatches": num_microbatches,
        "data-parallel size": groups.dp_size,
        "context-parallel size": groups.cp_size,
        "data x context parallel size": groups.dp_cp_size,
        "num_microbatches x data-parallel size": num_microbatches * groups.dp_size,
    }
    found = [f"x {n}" for n, v in sizes.items() if v > 1 and abs(ratio - v) < 1e-3 * v]
    found += [f"/ {n}" for n, v in sizes.items() if v > 1 and abs(ratio * v - 1) < 1e-3]
    return ", ".join(found) or "none of the sizes"
