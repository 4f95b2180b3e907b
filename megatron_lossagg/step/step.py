"""`Step`: one optimizer step, planned, run by the schedule, checked and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.factors import Regime
from megatron_lossagg.step.agreement import check_configuration
from megatron_lossagg.step.checks import check_pass
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.microbatch_report import (
    complete_reports,
    divide_reports,
    microbatch_report,
)
from megatron_lossagg.step.returned_loss import (
    check_gradients_are_wanted,
    metric_denominators,
    num_trained_tokens_seen,
    num_valid_tokens,
    with_graph,
)
from megatron_lossagg.step.schedule_pass import SchedulePass, TakenCount
from megatron_lossagg.step.step_report import count_evaluation, num_trained_tokens, step_report
from megatron_lossagg.weighted_sum import weights_of
from megatron_lossagg.weights.microbatch import METRIC_DIVISORS, Microbatch
from megatron_lossagg.weights.step_weights import StepWeights
from megatron_lossagg.weights.weighting import MAIN_MASK


class Step:
    """A planned step. Made by `LossAggregator.begin_step`.

    Args:
        context: what holds for it besides its weights; an attribute, as `plan`.
        plan: counts and weights of this rank's microbatches; None on a rank without data.
        microbatches: this rank's.
        known_counts: by mask, where a driver gave them.
        begins: called when a run of the schedule begins.

    Attributes:
        num_microbatches: M, what the schedule must be called with on this rank.
        is_counted: whether its counts are known, or under way; deferred ones are not at first.
    """

    def __init__(
        self,
        context: StepContext,
        plan: StepWeights | None,
        *,
        microbatches: Sequence[Microbatch] = (),
        known_counts: Mapping[str, GlobalCounts] | None = None,
        begins: Callable[[Step], None] | None = None,
    ) -> None:
        self.context = context
        self.plan = plan
        self._microbatches = microbatches
        self._known_counts = known_counts
        self._begins = begins
        self.num_microbatches = context.num_microbatches
        self._pass = SchedulePass()
        self._reported_empty: bool | None = None
        self.is_counted = not context.is_deferred

    @property
    def counts(self) -> GlobalCounts:
        """Counts of the global batch. Raises LossAggError on a rank that cannot know them."""
        if self.plan is not None:
            return self.plan.counts
        if self._known_counts is not None:
            first = self.context.objective.mask_keys[0]
            return self._known_counts.get(MAIN_MASK) or self._known_counts[first]
        raise LossAggError(
            "This rank was given no microbatches, so it takes part in no count. Read counts on a "
            "rank with data, or pass counts=GlobalCounts(...) to begin_step on every rank."
        )

    @property
    def is_empty(self) -> bool:
        """Whether no term that trains has a valid token in the global batch: skip the optimizer.

        A term trains if its coefficient at this step is not 0; its tokens are those of its own
        mask. Waits for the device. On a rank without data it is known only after `report`.

        Raises:
            LossAggError: it is not known yet on a rank without data.
        """
        if self._reported_empty is not None:
            return self._reported_empty
        objective = self.context.objective
        by_mask = self._known_counts
        if self.plan is not None and self.plan.counts_are_known:
            by_mask = {key: self.plan.counts_of(key) for key in objective.mask_keys}
        if by_mask is not None:
            return int(num_trained_tokens(objective, self.context.coefficients, by_mask)) == 0
        raise LossAggError(
            "is_empty is not known yet on a rank without data; call step.report(...) first, on "
            "every rank."
        )

    @property
    def is_validated(self) -> bool:
        """Whether `validate` has looked at the last run of the schedule."""
        return self._pass.is_validated

    @property
    def num_loss_calls(self) -> int:
        """How often `loss_func` ran in this pass."""
        return self._pass.num_loss_calls

    @property
    def microbatches(self) -> list[dict[str, Any]]:
        """Shallow copies of this rank's microbatches with weights; [] on a rank without data."""
        return [self.with_weights(m, index) for index, m in enumerate(self._microbatches)]

    def data_iterator(self, num_chunks: int = 1) -> list[Iterator[dict[str, Any]] | None]:
        """Fresh iterators for the schedule, one per model chunk; starts a new pass over the step.

        Each yields the same microbatches as shallow copies with their weights.

        Args:
            num_chunks: len(model), the chunks of this rank.

        Returns:
            An iterator per chunk; on a rank without data None, as Megatron's own loaders give.

        Raises:
            ValueError: `num_chunks` is below 1.
        """
        if num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1 (len(model)), got {num_chunks}.")
        self._pass = SchedulePass()
        if self._begins is not None:
            self._begins(self)
        if self.plan is None:
            return [None] * num_chunks
        return [self._iterate(self._pass.add_iterator()) for _ in range(num_chunks)]

    def with_weights(self, microbatch: Microbatch, index: int) -> dict[str, Any]:
        """A shallow copy of microbatch `index` with its weights, on a rank with data."""
        assert self.plan is not None
        return self.plan.with_weights(microbatch, index)

    def add_iterator(self) -> TakenCount:
        """Register one more iterator of a stream; it counts there what it hands out."""
        return self._running_pass().add_iterator()

    def _running_pass(self) -> SchedulePass:
        """The run of the schedule that is going on: after one that was validated, the next."""
        if self._pass.is_validated:
            self._pass = SchedulePass()
        return self._pass

    def _iterate(self, taken: TakenCount) -> Iterator[dict[str, Any]]:
        for index, microbatch in enumerate(self._microbatches):
            taken.value += 1
            yield self.with_weights(microbatch, index)
        raise LossAggError(
            f"More than the {len(self._microbatches)} microbatches of this step were asked for. "
            "Call the schedule with num_microbatches=step.num_microbatches, and "
            "step.data_iterator(...) anew for each run; a loop of your own goes over "
            "step.microbatches."
        )

    def loss_func(
        self, microbatch: Mapping[str, Any], output_tensor: Any, non_loss_data: bool = False
    ) -> Any:
        """The `loss_func` of a Megatron schedule. No collective, no host sync, no branch on data.

        S = sum of w * l over this rank's part of the microbatch.

        Args:
            microbatch: what the data iterator gave, sliced where there is context parallelism;
                bind it: `partial(step.loss_func, microbatch)`.
            output_tensor: the last stage's output, passed on to `loss_fn`.
            non_loss_data: what `collect_non_loss_data=True` sets; then only the report is returned.

        Returns:
            By regime, see `schedule`: R1 (S * M * D, report), R2 (S * M * D * C, 1, report), R3
            (S * T, number of valid tokens as int32, report), R4 (S * M / C, report). The report is
            a copy that the schedule's in-place rescaling does not reach: {"loss": [numerator,
            denominator]}, to be summed by `report` or Megatron-LM's train_step.
        """
        context, contract = self.context, self.context.contract
        if context.divides_later or context.forward_only:
            check_gradients_are_wanted(context)
        weights = [weights_of(microbatch, key) for key in context.weights_keys]
        sums = context.evaluate(
            output_tensor, microbatch, weights, context.coefficients, context.rows_are_sequences
        )
        run = self._running_pass()
        run.add_loss_call(weights)
        if self.plan is None:
            run.see_tokens(num_trained_tokens_seen(weights, context))
        num_tokens = None
        if contract.regime is Regime.R3 or context.pairs_by_tokens:
            num_tokens = num_valid_tokens(microbatch, weights, context)
            run.num_tokens.append(num_tokens)
        divisors, denominators = None, None
        if context.objective.metric_sums:
            if context.sees_weights:  # a captured graph would keep those of its first step
                divisors = microbatch.get(METRIC_DIVISORS)
                divisors = self.metric_divisors if divisors is None else divisors
            if divisors is None:
                denominators = metric_denominators(weights, context)
        report = microbatch_report(
            sums,
            context.objective.names,
            num_tokens=num_tokens if context.pairs_by_tokens else None,
            share=context.share,
            copies=context.cp_copies,
            divisors=divisors,
            metric_denominators=denominators or (),
        )
        run.reports.append(report)
        if non_loss_data:
            return report
        loss = with_graph(sums.total, output_tensor, context.groups) * context.loss_factor
        run.returned.append((sums.values, loss.detach()))  # an alias
        if contract.regime is Regime.R3:
            return loss, num_tokens, report
        if contract.returns_num_tokens:
            return loss, torch.ones_like(loss, dtype=torch.int32), report
        return loss, report

    @property
    def metric_divisors(self) -> Tensor | None:
        """What sums of metrics are divided by; None where it is not known, or there are none."""
        return None if self.plan is None else self.plan.metric_divisors

    def divide_reports(self, gradient_factor: float, divisors: Tensor | None) -> None:
        """Divide what `loss_func` reported by counts that came with final gradients, in place."""
        self.is_counted = True
        divide_reports(self._pass.reports, gradient_factor, divisors, self.context.share)

    def validate(self, num_tokens: Tensor | None = None) -> None:
        """Check the last run of the schedule: on the last stage an all-reduce over tp, and dp x cp.

        Call it on every rank before `optimizer.step()`; what happens afterwards is a new run. Held
        against each other: microbatches taken and M, what was done to the loss and the regime,
        weights and the checksum, the ranks of the stage. Waits for the device.

        Args:
            num_tokens: what the schedule summed up here for `finalize_model_grads` (R3), if known.

        Raises:
            LossAggError: on every rank of the group if one of them found a fault: do not step.
        """
        run = self._pass
        if run.is_validated:
            num_tokens = None  # it belongs to a run of another step
        run.is_validated = True
        sums = check_pass(run, self.plan, self.context, num_tokens)
        if sums is not None:
            complete_reports(run.reports, sums.num_tokens, self.context)

    def report(
        self,
        forward_data_store: Sequence[Mapping[str, Tensor]],
        *,
        broadcast_over_pipeline: bool = True,
    ) -> dict[str, float]:
        """The step's values: an all-reduce over dp x cp on the last stage, a broadcast over pp.

        Args:
            forward_data_store: what this rank's schedule returned; every rank calls it.
            broadcast_over_pipeline: tell earlier stages, too.

        Returns:
            {"loss": J, ...}, the same on every rank: the objective that was optimised, then every
            term (without its coefficient) and metric; with `report_counts` also num_tokens,
            num_seqs (B as the mode counts it), response_length (T/B) and masked_fraction (1 - T /
            positions of the masks). A minimum or maximum over no token is NaN. {} on earlier stages
            without `broadcast_over_pipeline`.
        """
        context, problem = self.context, None
        if context.groups.is_last_stage and not self.is_validated:
            check_configuration(context)
        is_to_count = not self.is_counted and not context.divides_later
        if is_to_count and context.groups.is_last_stage:
            problem = count_evaluation(self.plan, context.groups)
            self.is_counted = problem is None
        found = step_report(
            forward_data_store,
            self.plan,
            self._pass,
            context,
            problem=problem,
            over_pipeline=broadcast_over_pipeline,
        )
        if found is None:
            return {}
        self._reported_empty = found.is_empty
        return found.values
