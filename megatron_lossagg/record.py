"""What a schedule did with a step: counted while it runs, checked before the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device
from megatron_lossagg.plan import WeightPlan
from megatron_lossagg.schedule import ScheduleContract


@dataclass
class PassRecord:
    """One run of the schedule over a step.

    Attributes:
        num_taken: microbatches taken from each data iterator that was handed out.
        num_loss_calls: calls of `loss_func`.
        weight_sums: sum of the weights that each call saw, float64.
        returned: per call, the value that was returned and an alias of the tensor that was
            returned, which the schedule rescales in place.
        coarsest_eps: the largest machine epsilon among the weights' dtypes.
    """

    num_taken: list[int] = field(default_factory=list)
    num_loss_calls: int = 0
    weight_sums: list[Tensor] = field(default_factory=list)
    returned: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    coarsest_eps: float = 0.0

    def add_loss_call(self, weights: Tensor) -> None:
        """Note a call of `loss_func`; no value is read."""
        self.num_loss_calls += 1
        self.weight_sums.append(weights.sum(dtype=torch.float64))
        self.coarsest_eps = max(self.coarsest_eps, torch.finfo(weights.dtype).eps)


def local_problems(
    record: PassRecord,
    contract: ScheduleContract,
    num_microbatches: int,
    *,
    loss_is_expected: bool,
) -> list[str]:
    """What this rank alone can see to be wrong with a pass. Does not communicate."""
    problems = []
    for num_taken in record.num_taken:
        if num_taken != num_microbatches:
            problems.append(
                f"the schedule took {num_taken} microbatches from a data iterator, but the step "
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
    if record.returned:
        found = _rescaling_found(record.returned)
        expected = contract.schedule_factor(num_microbatches)
        if found is not None and abs(found - expected) > 1e-3 * expected:
            problems.append(
                f"the schedule rescaled the returned loss by {found:.6g}, expected {expected:.6g} "
                f"in regime {contract.regime} (context-parallel size {contract.cp_size}, "
                f"num_microbatches {num_microbatches}). Its num_microbatches differs from the "
                "plan's, or it is not Megatron-Core's own schedule"
            )
    return problems


def _rescaling_found(returned: list[tuple[Tensor, Tensor]]) -> float | None:
    """The factor that the schedule applied in place; None where every loss is 0 or not finite."""
    values = torch.stack(
        [torch.stack([value, alias]).double() for value, alias in returned]
    ).tolist()
    for value, alias in values:
        if value != 0 and value == value and abs(value) != float("inf"):
            return alias / value
    return None


def check_with_others(
    record: PassRecord,
    problems: list[str],
    plan: WeightPlan | None,
    contract: ScheduleContract,
    groups: ParallelGroups,
    *,
    check_sum: bool,
) -> None:
    """Compare the sum of all weights with the mode's checksum: one all-reduce over dp x cp.

    Only ranks of the last pipeline stage call it, all of them, also those that found a problem:
    then every rank raises and none waits for the others.
    """
    fallback = record.weight_sums[0].device if record.weight_sums else torch.device("cpu")
    device = communication_device(groups.dp_cp, fallback)
    weight_sum = (
        torch.stack(record.weight_sums).sum()
        if record.weight_sums
        else torch.zeros((), dtype=torch.float64)
    )
    has_problem = torch.tensor(float(bool(problems)), dtype=torch.float64)
    totals = torch.stack([weight_sum.to(device), has_problem.to(device)])
    all_reduce_sum(totals, groups.dp_cp)
    found, num_ranks_with_problems = totals.tolist()
    raise_problems(problems)
    if num_ranks_with_problems:
        raise LossAggError(
            f"{int(num_ranks_with_problems)} other rank(s) of this data x context parallel group "
            "found a fault in the step; their message says which. Do not step the optimizer."
        )
    if plan is None or not check_sum:
        return
    expected = plan.expected_weight_sum().item()
    found /= contract.cp_copies
    if abs(found - expected) > 16 * max(record.coarsest_eps, 1e-12) * max(abs(expected), 1e-300):
        raise LossAggError(
            f"The weights that loss_func saw sum to {found:.9g} over the global batch, but the "
            f"mode's checksum is {expected:.9g}. A microbatch was lost, repeated or altered "
            "between the plan and the loss: check that weights are sliced over context-parallel "
            f"ranks exactly as the losses are (here cp size {contract.cp_size}, "
            f"cp_gradient={contract.cp_gradient!r}) and that `dp` is the group over which "
            "different data is spread."
        )


def raise_problems(problems: list[str]) -> None:
    """Raise LossAggError with everything that was found, or return."""
    if problems:
        raise LossAggError("Before the optimizer steps: " + "; and ".join(problems) + ".")
