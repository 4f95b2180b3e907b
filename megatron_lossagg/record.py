"""What a schedule did with a step: counted while it runs, checked before the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lossagg.deferred import DeferredPlan
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device
from megatron_lossagg.plan import WeightPlan
from megatron_lossagg.schedule import ScheduleContract


@dataclass
class TakenCount:
    """How many microbatches one data iterator has handed out."""

    value: int = 0


@dataclass
class PassRecord:
    """One run of the schedule over a step.

    Attributes:
        taken: what each data iterator that was handed out has yielded.
        num_loss_calls: calls of `loss_func`.
        weight_sums: per call, the sums of the weights that it saw, float64 [num_weightings].
        returned: per call, the sums of which S comes first, and an alias of the tensor that was
            returned, S times the contract's factor, which the schedule rescales in place.
        num_tokens: what each call with a gradient returned as its number of tokens (R3).
        reports: what each call reported, [num_sums, 2].
        coarsest_eps: the largest machine epsilon among the weights' dtypes.
        is_validated: whether `validate` has looked at it: what happens afterwards is a new pass.
    """

    taken: list[TakenCount] = field(default_factory=list)
    num_loss_calls: int = 0
    weight_sums: list[Tensor] = field(default_factory=list)
    returned: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_tokens: list[Tensor] = field(default_factory=list)
    reports: list[Tensor] = field(default_factory=list)
    coarsest_eps: float = 0.0
    is_validated: bool = False

    def add_loss_call(self, weights: Sequence[Tensor]) -> None:
        """Note a call of `loss_func`; no value is read."""
        self.num_loss_calls += 1
        sums = [w.sum(dtype=torch.float64) for w in weights]
        self.weight_sums.append(torch.stack(sums) if len(sums) > 1 else sums[0].view(1))
        for w in weights:
            self.coarsest_eps = max(self.coarsest_eps, torch.finfo(w.dtype).eps)


def local_problems(
    record: PassRecord,
    contract: ScheduleContract,
    num_microbatches: int,
    *,
    loss_is_expected: bool,
    schedule_num_tokens: Tensor | None = None,
) -> list[str]:
    """What this rank alone can see to be wrong with a pass. Does not communicate."""
    problems = []
    for taken in record.taken:
        if taken.value != num_microbatches:
            problems.append(
                f"the schedule took {taken.value} microbatches from a data iterator, but the step "
                f"was planned for {num_microbatches}. Pass num_microbatches=step.num_microbatches "
                "to the schedule (or a num_microbatches to wrap() that gives what the schedule is "
                "called with): any other number silently scales the gradient"
            )
    if loss_is_expected and record.num_loss_calls != num_microbatches:
        problems.append(
            f"loss_func ran {record.num_loss_calls} times on this last-stage rank, but the step "
            f"was planned for {num_microbatches} microbatches. Return partial(step.loss_func, "
            "microbatch) from forward_step for every microbatch, and give the schedule the step's "
            "number of them"
        )
    if schedule_num_tokens is not None and record.num_tokens:
        # Several steps, each complete, in one run: in R3 the schedule rescales no loss.
        summed_up, returned = int(schedule_num_tokens), int(torch.stack(record.num_tokens).sum())
        if summed_up != returned:
            problems.append(
                f"the schedule summed up {summed_up} tokens on this rank, but the step's loss_func "
                f"returned {returned}: it ran with another num_microbatches than the step's "
                f"{num_microbatches}"
            )
    if record.returned:
        expected = contract.schedule_factor(num_microbatches)
        by_plugin = contract.loss_factor(num_microbatches)
        found = _other_rescaling(record.returned, by_plugin, expected)
        if found is not None:
            problems.append(
                f"the schedule rescaled the returned loss by {found:.6g}, expected {expected:.6g} "
                f"in regime {contract.regime} (context-parallel size {contract.cp_size}, "
                f"num_microbatches {num_microbatches}). Its num_microbatches differs from the "
                "plan's, or it is not Megatron-Core's own schedule"
            )
    return problems


def _other_rescaling(
    returned: list[tuple[Tensor, Tensor]], by_plugin: float, expected: float
) -> float | None:
    """A factor that the schedule applied in place to some loss if it is not `expected`, else None.

    Losses that are 0, not finite before or after, or too small to be rescaled without rounding
    tell nothing.
    """
    sums = torch.stack([values[0] for values, _ in returned]).tolist()
    aliases = torch.stack([alias for _, alias in returned]).tolist()
    for total, alias, (_, loss) in zip(sums, aliases, returned, strict=True):
        value, info = total * by_plugin, torch.finfo(loss.dtype)
        is_telling = info.tiny / info.eps < abs(value) and not math.isinf(alias)
        if is_telling and not abs(alias / value - expected) <= 1e-3 * expected:
            return alias / value
    return None


def check_with_others(
    record: PassRecord,
    problems: list[str],
    plan: WeightPlan | DeferredPlan | None,
    contract: ScheduleContract,
    groups: ParallelGroups,
    *,
    num_weightings: int,
    check_sum: bool,
    compare_with_plan: bool = False,
    plan_copies: int = 1,
) -> None:
    """Compare sums of all weights with the modes' checksums: one all-reduce over dp x cp.

    Only ranks of the last pipeline stage call it, all of them, also those that found a problem:
    then every rank raises and none waits for the others. `compare_with_plan` is set on all ranks if
    a mode has no checksum; a plan's weights are on `plan_copies` context-parallel ranks.
    """
    fallback = record.weight_sums[0].device if record.weight_sums else torch.device("cpu")
    device = communication_device(groups.dp_cp, fallback)
    weight_sum = (
        torch.stack(record.weight_sums).sum(dim=0)
        if record.weight_sums
        else torch.zeros(num_weightings, dtype=torch.float64)
    )
    planned = torch.zeros(num_weightings, dtype=torch.float64)
    if compare_with_plan and isinstance(plan, WeightPlan):
        planned = plan.planned_weight_sums()
    has_problem = torch.tensor([float(bool(problems))], dtype=torch.float64)
    totals = torch.cat([weight_sum.to(device), planned.to(device), has_problem.to(device)])
    all_reduce_sum(totals, groups.dp_cp)
    *sums, num_ranks_with_problems = totals.tolist()
    found, planned_sums = sums[:num_weightings], sums[num_weightings:]
    raise_problems(problems)
    if num_ranks_with_problems:
        raise LossAggError(
            f"{int(num_ranks_with_problems)} other rank(s) of this data x context parallel group "
            "found a fault in the step; their message says which. Do not step the optimizer."
        )
    expected = plan.expected_weight_sums() if plan is not None and check_sum else None
    if expected is None:
        return
    for index, checksum in enumerate(expected.tolist()):
        if math.isnan(checksum):  # a registered mode without one; whole masks are on all C ranks
            checksum = planned_sums[index] / plan_copies
        _check_sum(found[index] / contract.cp_copies, checksum, index, record, contract)


def _check_sum(
    found: float, expected: float, index: int, record: PassRecord, contract: ScheduleContract
) -> None:
    # Each weight is rounded once (half an epsilon); the sum is float64.
    tolerance = max(record.coarsest_eps, 1e-12) * abs(expected)
    if not abs(found - expected) <= tolerance:  # in this order, so that a NaN raises
        which = "" if index == 0 else f" (number {index} of the terms' modes and masks)"
        raise LossAggError(
            f"The weights that loss_func saw{which} sum to {found:.9g} over the global batch, but "
            f"the mode's checksum is {expected:.9g}. A microbatch was lost, repeated or altered "
            "between the plan and the loss: check that loss_func is given this step's microbatches "
            "with the weights that they carry, that weights are sliced over context-parallel "
            f"ranks exactly as the losses are (here cp size {contract.cp_size}, "
            f"cp_gradient={contract.cp_gradient!r}) and that `dp` is the group over which "
            "different data is spread."
        )


def raise_problems(problems: list[str]) -> None:
    """Raise LossAggError with everything that was found, or return."""
    if problems:
        raise LossAggError("Before the optimizer steps: " + "; and ".join(problems) + ".")
