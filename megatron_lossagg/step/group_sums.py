"""`GroupSums`: what the ranks of the last stage found in a run of the schedule, summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import NUM_HELD
from megatron_lossagg.groups import all_reduce_sum, communication_device
from megatron_lossagg.step.agreement import local_fingerprint
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.schedule_pass import SchedulePass
from megatron_lossagg.weights.step_weights import StepWeights

NUM_SLOTS = 16


@dataclass(frozen=True)
class GroupSums:
    """What the ranks of the last stage found, summed over dp x cp.

    Attributes:
        fingerprint: of `local_fingerprint`.
        weights: per slot, see `in_slots`, what `loss_func` saw.
        planned: per slot the weights that were planned, where a mode has no checksum.
        num_tokens: what `loss_func` returned as its numbers of tokens (R3).
        held: what planned microbatches hold, see `counts.held_counts`.
        given: of each such number how many ranks were given it, the sum and the sum of squares.
        num_problems: ranks that found a fault of their own.
    """

    fingerprint: list[float]
    weights: list[float]
    planned: list[float]
    num_tokens: float
    held: list[float]
    given: list[list[float]]
    num_problems: float


def sum_over_group(
    run: SchedulePass, has_problem: bool, plan: StepWeights | None, context: StepContext
) -> GroupSums:
    """Sum what the ranks of the last stage found: one all-reduce over dp x cp.

    Its length never depends on what may differ between ranks, so that these find out.

    Args:
        run: what the schedule did.
        has_problem: whether this rank found a fault of its own.
        plan: the weights, on a rank with data.
        context: of the step.

    Returns:
        The sums, the same on every rank.
    """
    device = run.weight_sums[0].device if run.weight_sums else torch.device("cpu")
    parts = {
        "fingerprint": local_fingerprint(context),
        "weights": torch.zeros(NUM_SLOTS, dtype=torch.float64),
        "planned": torch.zeros(NUM_SLOTS, dtype=torch.float64),
        "num_tokens": torch.zeros(1, dtype=torch.float64),
        "held": torch.zeros(NUM_HELD, dtype=torch.float64),
        "given": torch.zeros(3 * NUM_HELD, dtype=torch.float64),
        "num_problems": torch.full((1,), float(has_problem), dtype=torch.float64),
    }
    if run.weight_sums:
        parts["weights"] = in_slots(torch.stack(run.weight_sums).sum(dim=0))
    if run.num_tokens:
        parts["num_tokens"] = torch.stack(run.num_tokens).sum().double().view(1)
    if plan is not None:
        if plan.counts_are_given:
            parts["given"] = plan.given_here().flatten()
        parts["held"] = plan.held_here().double()
        if not context.objective.has_checksums:
            parts["planned"] = in_slots(plan.planned_weight_sums())
    on = communication_device(context.groups.dp_cp, device)
    totals = torch.cat([part.to(on) for part in parts.values()])
    all_reduce_sum(totals, context.groups.dp_cp)
    summed = totals.cpu().split([part.numel() for part in parts.values()])
    found = {name: part.tolist() for name, part in zip(parts, summed, strict=True)}
    return GroupSums(
        fingerprint=found["fingerprint"],
        weights=found["weights"],
        planned=found["planned"],
        num_tokens=found["num_tokens"][0],
        held=found["held"],
        given=[found["given"][row * NUM_HELD : (row + 1) * NUM_HELD] for row in range(3)],
        num_problems=found["num_problems"][0],
    )


def in_slots(sums: Tensor) -> Tensor:
    """Sums of all weightings in a vector of fixed length, those beyond it added to the first ones.

    Args:
        sums: float64 [num_weightings].

    Returns:
        float64 [NUM_SLOTS].
    """
    slots = torch.zeros(NUM_SLOTS, dtype=torch.float64, device=sums.device)
    places = torch.arange(len(sums), device=sums.device) % NUM_SLOTS
    return slots.index_add_(0, places, sums.double())
