"""What a schedule did with a step: counted while it runs, checked before the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import NUM_HELD, held_counts, held_place
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import all_reduce_sum, communication_device
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.microbatch_report import MicrobatchReport
from megatron_lossagg.weights.deferred import DeferredPlan
from megatron_lossagg.weights.plan import WeightPlan


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
        num_tokens: what each call returned as its number of tokens (R3).
        reports: what each call reported.
        tokens_seen: without a plan, above 0 if a call saw a valid token; see `Totals`.
        coarsest_eps: the largest machine epsilon among the weights' dtypes.
        is_validated: whether `validate` has looked at it: what happens afterwards is a new pass.
    """

    taken: list[TakenCount] = field(default_factory=list)
    num_loss_calls: int = 0
    weight_sums: list[Tensor] = field(default_factory=list)
    returned: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_tokens: list[Tensor] = field(default_factory=list)
    reports: list[MicrobatchReport] = field(default_factory=list)
    tokens_seen: Tensor | None = None
    coarsest_eps: float = 0.0
    is_validated: bool = False

    def see_tokens(self, num_tokens: Tensor) -> None:
        """Note valid tokens of a call; no value is read."""
        before = self.tokens_seen
        self.tokens_seen = num_tokens if before is None else before + num_tokens.to(before.device)

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


@dataclass(frozen=True)
class GroupSums:
    """What the ranks of the last stage found, summed over dp x cp.

    Attributes:
        weights: of each weighting, what `loss_func` saw.
        planned: of each weighting, the weights that were planned, where a mode has no checksum.
        num_tokens: what `loss_func` returned as its numbers of tokens (R3).
        held: what planned microbatches hold, see `counts.held_counts`.
        given: of each such number how many ranks were given it, the sum and the sum of squares.
        num_problems: ranks that found a fault of their own.
    """

    weights: list[float]
    planned: list[float]
    num_tokens: float
    held: list[float]
    given: list[list[float]]
    num_problems: float


def check_with_others(
    record: PassRecord,
    problems: list[str],
    plan: WeightPlan | DeferredPlan | None,
    context: StepContext,
) -> GroupSums:
    """Compare what all ranks saw with what was planned: one all-reduce over dp x cp.

    Only ranks of the last pipeline stage call it, all of them, also those that found a problem:
    then every rank raises and none waits for the others.
    """
    sums = _sum_over_ranks(record, problems, plan, context)
    raise_problems(problems)
    if sums.num_problems:
        raise LossAggError(
            f"{int(sums.num_problems)} other rank(s) of this data x context parallel group found a "
            "fault in the step; their message says which. Do not step the optimizer."
        )
    if plan is None or not context.sees_weights or not plan.counts_are_known:
        return sums
    contract = context.contract
    if isinstance(plan, WeightPlan) and plan.counts_are_given:
        _check_given(plan, sums, context)
    _check_num_tokens(sums, plan, record, context)
    expected = plan.expected_weight_sums()
    for index, checksum in enumerate(() if expected is None else expected.tolist()):
        if math.isnan(checksum):  # a registered mode without one; whole masks are on all C ranks
            checksum = sums.planned[index] / context.plan_copies
        found = sums.weights[index] / contract.cp_copies
        _check_sum(found, checksum, index, record, contract, plan.weight_eps)
    return sums


def _sum_over_ranks(
    record: PassRecord,
    problems: list[str],
    plan: WeightPlan | DeferredPlan | None,
    context: StepContext,
) -> GroupSums:
    fallback = record.weight_sums[0].device if record.weight_sums else torch.device("cpu")
    device = communication_device(context.groups.dp_cp, fallback)
    sizes = [len(context.weights_keys), len(context.weights_keys), 1, NUM_HELD, 3 * NUM_HELD, 1]
    weights, planned, num_tokens, held, given, num_problems = (
        torch.zeros(size, dtype=torch.float64, device=device) for size in sizes
    )
    if record.weight_sums:
        weights += torch.stack(record.weight_sums).sum(dim=0).to(device)
    if record.num_tokens:
        num_tokens += torch.stack(record.num_tokens).sum().to(device)
    if isinstance(plan, WeightPlan):
        held += plan.held_here.to(device)
        given += plan.given_here().flatten().to(device)
        if not context.objective.has_checksums:
            planned += plan.planned_weight_sums().to(device)
    num_problems += float(bool(problems))
    totals = torch.cat([weights, planned, num_tokens, held, given, num_problems])
    all_reduce_sum(totals, context.groups.dp_cp)
    parts = [part.tolist() for part in totals.split(sizes)]
    of_given = totals.split(sizes)[4].view(3, NUM_HELD).tolist()
    return GroupSums(parts[0], parts[1], parts[2][0], parts[3], of_given, parts[5][0])


def _check_given(plan: WeightPlan, sums: GroupSums, context: StepContext) -> None:
    """Raise LossAggError on every rank if a driver's counts are not what all ranks hold.

    Sums of x and x^2 over the ranks that were given a count tell whether all of them are right.
    """
    held = [number / context.contract.cp_size for number in sums.held]  # whole masks on C ranks
    for slot, mask_key in enumerate(plan.mask_keys):
        given = plan.given_counts.get(mask_key)
        for name, held_by_all in held_counts(held, slot).items():
            place = held_place(name, slot)
            num, total, squares = (of_given[place] for of_given in sums.given)
            are_right = math.isclose(total, num * held_by_all, rel_tol=1e-12) and math.isclose(
                squares, num * held_by_all**2, rel_tol=1e-12
            )
            if given is None or are_right:
                continue
            own = int(getattr(given, name))
            who = "counts" if own != held_by_all else "counts of another rank"
            said = f"says {name}={own}" if own != held_by_all else f"says another {name}"
            raise LossAggError(
                f"{who} {said} for {mask_key!r}, but the microbatches of all ranks hold "
                f"{held_by_all}.{_weights_beside(plan, sums, context)} Pass the counts of exactly "
                "the microbatches of this step, the same on every rank, or leave counts out: they "
                "are then counted."
            )


def _weights_beside(plan: WeightPlan, sums: GroupSums, context: StepContext) -> str:
    """What wrong counts did to the weights, if that shows in their sum."""
    found = sums.weights[0] / context.contract.cp_copies
    expected = plan.expected_weight_sums()[0].item()
    if math.isclose(found, expected, rel_tol=1e-6) or math.isnan(expected):
        return ""
    return f" The weights sum to {found:.9g} over them, and the mode's checksum is {expected:.9g}."


def _check_num_tokens(
    sums: GroupSums, plan: WeightPlan | DeferredPlan, record: PassRecord, context: StepContext
) -> None:
    """In R3 finalize divides by what `loss_func` returned as numbers of tokens."""
    if context.contract.regime != "R3":
        return
    expected = int(plan.counts.num_tokens)
    if sums.num_tokens != expected:
        raise LossAggError(
            f"The numbers of tokens that loss_func returned sum to {int(sums.num_tokens)}, but the "
            f"mask of the global batch has {expected} valid tokens. Megatron divides gradients by "
            "the first number when calculate_per_token_loss is on: give loss_func the microbatch "
            "with its 'loss_mask' (or the weights that replaced it, whose zeros keep their sign) "
            "as the iterator yielded it, sliced over context-parallel ranks as the losses are."
        )


def _check_sum(
    found: float,
    expected: float,
    index: int,
    record: PassRecord,
    contract: ScheduleContract,
    weight_eps: float,
) -> None:
    # Each weight is rounded once (half an epsilon); the sum is float64.
    tolerance = max(record.coarsest_eps, weight_eps, 1e-12) * abs(expected)
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
