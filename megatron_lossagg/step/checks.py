"""What a schedule did with a step, checked before the optimizer steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import held_counts, held_place
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.schedule.factors import MAX_NUM_TOKENS_R3, Regime
from megatron_lossagg.step.agreement import configuration_problem, tp_problems
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.group_sums import NUM_SLOTS, GroupSums, in_slots, sum_over_group
from megatron_lossagg.step.schedule_pass import SchedulePass
from megatron_lossagg.weights.step_weights import StepWeights


def check_pass(
    run: SchedulePass,
    plan: StepWeights | None,
    context: StepContext,
    schedule_num_tokens: Tensor | None,
) -> GroupSums | None:
    """Raise LossAggError if a run was not as planned: an all-reduce over tp, one over dp x cp.

    Args:
        run: what the schedule did.
        plan: the weights, on a rank with data.
        context: of the step.
        schedule_num_tokens: what the schedule summed up for `finalize_model_grads` (R3), if known.

    Returns:
        What the ranks of the last stage found together; None on other stages.
    """
    is_last_stage = context.groups.is_last_stage
    problems = local_problems(
        run,
        context.contract,
        context.num_microbatches,
        loss_is_expected=context.computes_loss,
        schedule_num_tokens=schedule_num_tokens if context.sees_weights else None,
    )
    if plan is not None:
        problems += _count_problems(plan, context.contract)
    if is_last_stage:
        problems += tp_problems(run, context)
        return _check_with_others(run, problems, plan, context)
    _raise_problems(problems)
    return None


def local_problems(
    run: SchedulePass,
    contract: ScheduleContract,
    num_microbatches: int,
    *,
    loss_is_expected: bool,
    schedule_num_tokens: Tensor | None = None,
) -> list[str]:
    """What this rank alone can see to be wrong with a pass. Does not communicate."""
    problems = []
    for taken in run.taken:
        if taken.value != num_microbatches:
            problems.append(
                f"the schedule took {taken.value} microbatches from a data iterator, but the step "
                f"was planned for {num_microbatches}. Pass num_microbatches=step.num_microbatches "
                "to the schedule (or a num_microbatches to wrap() that gives what the schedule is "
                "called with): any other number silently scales the gradient"
            )
    if loss_is_expected and run.num_loss_calls != num_microbatches:
        problems.append(
            f"loss_func ran {run.num_loss_calls} times on this last-stage rank, but the step "
            f"was planned for {num_microbatches} microbatches. Return partial(step.loss_func, "
            "microbatch) from forward_step for every microbatch, and give the schedule the step's "
            "number of them"
        )
    if schedule_num_tokens is not None and run.num_tokens:
        # Several steps, each complete, in one run: in R3 the schedule rescales no loss.
        summed_up, returned = int(schedule_num_tokens), int(torch.stack(run.num_tokens).sum())
        if summed_up != returned:
            problems.append(
                f"the schedule summed up {summed_up} tokens on this rank, but the step's loss_func "
                f"returned {returned}: it ran with another num_microbatches than the step's "
                f"{num_microbatches}"
            )
    if run.returned:
        expected = contract.schedule_factor(num_microbatches)
        by_plugin = contract.loss_factor(num_microbatches)
        found = _other_rescaling(run.returned, by_plugin, expected)
        if found is not None:
            problems.append(
                f"the schedule rescaled the returned loss by {found:.6g}, expected {expected:.6g} "
                f"in regime {contract.regime} (context-parallel size {contract.cp_size}, "
                f"num_microbatches {num_microbatches}). Its num_microbatches differs from the "
                "plan's, or it is not Megatron-Core's own schedule"
            )
    return problems


def _count_problems(plan: StepWeights, contract: ScheduleContract) -> list[str]:
    """What is wrong with the counts of the global batch."""
    problems = []
    try:
        plan.check_counts()
    except LossAggError as error:
        problems.append(str(error).rstrip("."))
    if contract.regime is Regime.R3 and plan.counts_are_known:
        num_tokens = int(plan.counts.num_tokens)
        if num_tokens > MAX_NUM_TOKENS_R3:
            problems.append(
                f"the global batch has {num_tokens} valid tokens, but Megatron sums num_tokens "
                f"in int32 (at most {MAX_NUM_TOKENS_R3}) when calculate_per_token_loss is on. "
                "Set calculate_per_token_loss=False"
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


def _check_with_others(
    run: SchedulePass, problems: list[str], plan: StepWeights | None, context: StepContext
) -> GroupSums:
    """Compare what all ranks saw with what was planned: one all-reduce over dp x cp.

    All ranks of the last pipeline stage call it.

    Raises:
        LossAggError: on every rank, also if one alone found a problem: none waits for the others.
    """
    sums = sum_over_group(run, bool(problems), plan, context)
    difference = configuration_problem(sums.fingerprint, context)
    if difference is not None and not any("configured differently" in p for p in problems):
        problems.append(difference)
    _raise_problems(problems)
    if sums.num_problems:
        raise LossAggError(
            f"{int(sums.num_problems)} other rank(s) of this data x context parallel group found a "
            "fault in the step; their message says which. Do not step the optimizer."
        )
    if plan is not None and context.sees_weights and plan.counts_are_known:
        if plan.counts_are_given:
            _check_given(plan, sums, context)
        if context.contract.regime is Regime.R3:
            _check_num_tokens(plan, sums)
        _check_weight_sums(plan, sums, run, context)
    return sums


def _check_given(plan: StepWeights, sums: GroupSums, context: StepContext) -> None:
    """Hold a driver's counts against what all ranks hold: sums of x and x^2 tell if all are right.

    Raises:
        LossAggError: on every rank.
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


def _weights_beside(plan: StepWeights, sums: GroupSums, context: StepContext) -> str:
    """What wrong counts did to the weights, if that shows in their sum."""
    found = sums.weights[0] / context.cp_copies
    expected = plan.expected_weight_sums()[0].item()
    if math.isclose(found, expected, rel_tol=1e-6) or math.isnan(expected):
        return ""
    return f" The weights sum to {found:.9g} over them, and the mode's checksum is {expected:.9g}."


def _check_num_tokens(plan: StepWeights, sums: GroupSums) -> None:
    """In R3 finalize divides by what `loss_func` returned as numbers of tokens."""
    expected = int(plan.counts.num_tokens)
    if sums.num_tokens != expected:
        raise LossAggError(
            f"The numbers of tokens that loss_func returned sum to {int(sums.num_tokens)}, but the "
            f"mask of the global batch has {expected} valid tokens. Megatron divides gradients by "
            "the first number when calculate_per_token_loss is on: give loss_func the microbatch "
            "with its 'loss_mask' (or the weights that replaced it, whose zeros keep their sign) "
            "as the iterator yielded it, sliced over context-parallel ranks as the losses are."
        )


def _check_weight_sums(
    plan: StepWeights, sums: GroupSums, run: SchedulePass, context: StepContext
) -> None:
    """The weights that `loss_func` saw sum to what the mode's checksum says."""
    contract = context.contract
    num_slots = min(NUM_SLOTS, len(context.weights_keys))
    for index, expected in enumerate(in_slots(plan.expected_weight_sums())[:num_slots].tolist()):
        if math.isnan(expected):  # a registered mode without one; whole masks are on all C ranks
            expected = sums.planned[index] / context.mask_copies
        found = sums.weights[index] / context.cp_copies
        # Each weight is rounded once (half an epsilon); the sum is float64.
        tolerance = max(run.coarsest_eps, plan.weight_eps, 1e-12) * abs(expected)
        if not abs(found - expected) <= tolerance:  # in this order, so that a NaN raises
            which = "" if index == 0 else f" (number {index} of the terms' modes and masks)"
            raise LossAggError(
                f"The weights that loss_func saw{which} sum to {found:.9g} over the global batch, "
                f"but the mode's checksum is {expected:.9g}. A microbatch was lost, repeated or "
                "altered between the plan and the loss: check that loss_func is given this step's "
                "microbatches with the weights that they carry, that weights are sliced over "
                "context-parallel ranks exactly as the losses are (here cp size "
                f"{contract.cp_size}, cp_gradient={contract.cp_gradient!r}) and that `dp` is the "
                "group over which different data is spread."
            )


def _raise_problems(problems: list[str]) -> None:
    """Raise LossAggError with everything that was found, or return."""
    if problems:
        raise LossAggError("Before the optimizer steps: " + "; and ".join(problems) + ".")
