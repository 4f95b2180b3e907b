"""The gradients of a measured schedule call, beside what they should be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, communication_device
from megatron_lossagg.schedule.factors import ScheduleFactors


@dataclass(frozen=True)
class MeasuredCall:
    """One call of the schedule in which every `loss_func` call stands for a partial sum of 1.

    Attributes:
        factors: what is expected of the schedule.
        groups: the process groups it runs on.
        num_microbatches: M.
    """

    factors: ScheduleFactors
    groups: ParallelGroups
    num_microbatches: int

    @property
    def num_calls(self) -> int:
        """M * D * C `loss_func` calls: the sum of the partial sums, and the right gradient."""
        return self.num_microbatches * self.groups.dp_size * self.groups.cp_size

    @property
    def returned_loss(self) -> float:
        """What one `loss_func` call returns."""
        returned = self.factors.loss_factor(self.num_microbatches)
        if self.factors.weights_carry_num_tokens:
            returned *= self.num_calls  # one token per call, so T is the number of calls
        return returned


def gradient_of(chunk: Any, groups: ParallelGroups) -> float:
    """Gathers over dp x cp: the gradient of the chunk's one parameter.

    With the distributed optimizer only the owner of the first shard has it reduced; otherwise all
    ranks have it, and NaN is returned if they differ.
    """
    [parameter] = chunk.parameters()
    # DDP empties `grad` into `main_grad`; FSDP wrappers leave it, as a sharded DTensor.
    found = parameter.main_grad if parameter.grad is None else parameter.grad
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    gradient = found.detach().double().reshape(1).clone()
    values = _gathered(gradient, groups.dp_cp, groups.dp_cp_size)
    if chunk.ddp_config.use_distributed_optimizer and parameter.grad is None:
        return values[0]
    return values[0] if all(value == values[0] for value in values) else math.nan


def check_gradients(gradients: list[float], call: MeasuredCall, dtype: torch.dtype) -> None:
    """Gathers over pp: raise LossAggError on every stage if one stage's gradient is off.

    Args:
        gradients: of this rank's chunks.
        call: what was measured.
        dtype: of the parameters, which the tolerance follows.

    Raises:
        LossAggError: on every stage.
    """
    groups = call.groups
    undo_gather = call.factors.undo_cp_gather  # no gather is in the measured model
    ratios = [gradient / call.num_calls / undo_gather for gradient in gradients]
    worst = torch.tensor([max(ratios, key=_distance_from_1)], dtype=torch.float64)
    if groups.pp_size > 1:
        worst = worst.to(communication_device(groups.pp, worst.device))
    ratio = max(_gathered(worst, groups.pp, groups.pp_size), key=_distance_from_1)
    if _distance_from_1(ratio) <= max(4 * torch.finfo(dtype).eps, 1e-6):
        return
    if math.isnan(ratio):
        raise LossAggError(
            "Measured schedule: data x context parallel ranks end with different gradients in "
            f"regime {call.factors.regime}. Do not train with it; check finalize_model_grads_func "
            "and the groups it reduces over."
        )
    raise LossAggError(
        f"Measured schedule: in regime {call.factors.regime} a gradient arrives {ratio:.6g} times "
        f"as large as it should (num_microbatches={call.num_microbatches}, data-parallel size "
        f"{groups.dp_size}, context-parallel size {groups.cp_size}). The schedule, DDP or "
        "finalize_model_grads_func does not scale as Megatron-Core's own; factors that would "
        f"explain it: {_explanations(ratio, call)}."
    )


def _gathered(value: torch.Tensor, group: Any, size: int) -> list[float]:
    """The one element of every rank's tensor (communicates over the group that is passed)."""
    if size == 1:
        return [value.item()]
    everyones = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(everyones, value, group=group)
    return [one.item() for one in everyones]


def _distance_from_1(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else abs(ratio - 1)


def _explanations(ratio: float, call: MeasuredCall) -> str:
    """Products of the sizes that equal the ratio."""
    m, groups = call.num_microbatches, call.groups
    sizes = {
        "num_microbatches": m,
        "data-parallel size": groups.dp_size,
        "context-parallel size": groups.cp_size,
        "data x context parallel size": groups.dp_cp_size,
        "num_microbatches x data-parallel size": m * groups.dp_size,
    }
    found = [f"x {n}" for n, v in sizes.items() if v > 1 and abs(ratio - v) < 1e-3 * v]
    found += [f"/ {n}" for n, v in sizes.items() if v > 1 and abs(ratio * v - 1) < 1e-3]
    return ", ".join(found) or "none of the sizes"
