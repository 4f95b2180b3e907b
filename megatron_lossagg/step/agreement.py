"""Whether ranks that should see the same of a step do: over context- and tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.agreement import describe_differences, fingerprint
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import all_reduce_max, all_reduce_sum, communication_device
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.schedule_pass import SchedulePass

# S of tensor-parallel ranks may differ by this much of the sum of |S| over microbatches.
TOLERANCE = 1e-4
# So that sums of squares over 2^14 ranks are exact in float64.
_BITS = 16


def local_fingerprint(context: StepContext) -> Tensor:
    """1, x and x^2 of a number x that is equal on ranks configured alike: float64 [3], for a sum.

    Args:
        context: of the step.

    Returns:
        The numbers of this rank, on the CPU.
    """
    x = float(fingerprint(context.identity, _BITS))
    return torch.tensor([1.0, x, x * x], dtype=torch.float64)


def configuration_problem(summed: list[float], context: StepContext) -> str | None:
    """What differs between the ranks of dp x cp; where something does, an all-gather over them.

    Args:
        summed: of `local_fingerprint`, over all ranks of dp x cp, which then all call this.
        context: of the step.

    Returns:
        The options that differ with their values and ranks; None: nothing does.
    """
    num_ranks, total, squares = (int(number) for number in summed)
    if total**2 == num_ranks * squares:
        return None
    return _difference("data x context parallel", context.groups.dp_cp, context)


def _difference(ranks: str, group: Any, context: StepContext) -> str:
    """In what the ranks of `group`, which all know that they differ, do: an all-gather over it."""
    how = describe_differences(context.identity, group)
    return (
        f"the {ranks} ranks were configured differently: {how}. Build LossAggregator with the same "
        "arguments on every rank"
    )


def check_configuration(context: StepContext) -> None:
    """Compare options before a message whose length they decide: an all-reduce over dp x cp.

    Args:
        context: of the step.

    Raises:
        LossAggError: on every rank, if something differs.
    """
    summed = local_fingerprint(context)
    summed = summed.to(communication_device(context.groups.dp_cp, summed.device))
    all_reduce_sum(summed, context.groups.dp_cp)
    problem = configuration_problem(summed.tolist(), context)
    if problem is not None:
        raise LossAggError(f"Before the report: {problem}.")


def tp_problems(run: SchedulePass, context: StepContext) -> list[str]:
    """What differs between tensor-parallel ranks of the last stage: an all-reduce over tp.

    They compute the same losses from the same batch, each with its part of the model. An all-gather
    more tells which options differ, where some do.

    Args:
        run: what the schedule did.
        context: of the step.

    Returns:
        What is wrong, the same on all tensor-parallel ranks; [] where nothing is.
    """
    group = context.groups.tp
    if context.groups.tp_size == 1 or not context.counts_loss_calls:
        return []
    totals = torch.zeros(2, dtype=torch.float64)
    size = torch.zeros((), dtype=torch.float64)
    if run.returned:
        sums = torch.stack([values[0].double() for values, _ in run.returned]).cpu()
        totals[0], size = sums.sum(), sums.abs().sum()
    if run.weight_sums:
        totals[1] = torch.stack(run.weight_sums).sum().cpu()
    is_nan = totals.isnan().double()
    own = torch.cat([totals.nan_to_num(), is_nan, local_fingerprint(context)[1:2]])
    both = torch.cat([own, -own, size.nan_to_num().view(1)])
    both = both.to(communication_device(group, both.device))
    all_reduce_max(both, group)
    largest, smallest, [size_of_all] = (
        both[: len(own)].tolist(),
        (-both[len(own) : -1]).tolist(),
        both[-1:].tolist(),
    )
    if largest[-1] != smallest[-1]:
        return [_difference("tensor-parallel", group, context)]
    problems = []
    if largest[0] - smallest[0] > TOLERANCE * size_of_all or largest[2] != smallest[2]:
        problems.append(
            "losses differ between tensor-parallel ranks: the sums of this step's weighted losses "
            f"are between {smallest[0]:.6g} and {largest[0]:.6g}. Every rank needs the loss of the "
            "whole vocabulary, of the same batch: use vocab_parallel_cross_entropy or "
            "log_probs_from_logits, not this rank's shard of the logits, and broadcast or read the "
            "same microbatches"
        )
    elif largest[1] - smallest[1] > 1e-6 * abs(largest[1]) or largest[3] != smallest[3]:
        problems.append(
            "weights differ between tensor-parallel ranks: their sums are between "
            f"{smallest[1]:.9g} and {largest[1]:.9g}. Broadcast the fields of "
            "aggregator.weights_keys from tensor-parallel rank 0, or give all ranks the same masks"
        )
    return problems
