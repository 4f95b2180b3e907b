"""One optimizer step as the caller sees it: iterators, loss function, checks, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import all_reduce_extremes, communication_device
from megatron_lossagg.objective.evaluation import Sums
from megatron_lossagg.objective.microbatch_report import MicrobatchReport, microbatch_report
from megatron_lossagg.objective.terms import MAIN_MASK
from megatron_lossagg.schedule.factors import MAX_NUM_TOKENS_R3
from megatron_lossagg.step.checks import (
    GroupSums,
    PassRecord,
    TakenCount,
    check_with_others,
    local_problems,
    raise_problems,
)
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.report import reduce_reports
from megatron_lossagg.step.returned_loss import (
    metric_denominators,
    num_trained_tokens_seen,
    num_valid_tokens,
    with_graph,
)
from megatron_lossagg.step.step_counts import (
    StepCounts,
    needs_step_counts,
    num_step_counts,
    num_trained_tokens,
    pack_step_counts,
)
from megatron_lossagg.weighted_sum import weights_of
from megatron_lossagg.weights.deferred import DeferredPlan, sum_over_ranks
from megatron_lossagg.weights.microbatch import METRIC_DIVISORS
from megatron_lossagg.weights.plan import WeightPlan


class Step:
    """A planned step. Made by `LossAggregator.begin_step`.

    Attributes:
        num_microbatches: M, what the schedule must be called with on this rank.
        is_counted: whether its counts are known, or under way; deferred ones are not at first.
    """

    def __init__(
        self,
        context: StepContext,
        plan: WeightPlan | DeferredPlan | None,
        num_microbatches: int,
        known_counts: Mapping[str, GlobalCounts] | None = None,
        begin_pass: Callable[[Step], None] | None = None,
    ) -> None:
        self._context = context
        self._plan = plan
        self._known_counts = known_counts
        self._begin_pass = begin_pass
        self.num_microbatches = num_microbatches
        self._record = PassRecord()
        self._reported_empty: bool | None = None
        self.is_counted = not context.is_deferred

    @property
    def plan(self) -> WeightPlan | DeferredPlan | None:
        """Counts and weights of this rank's microbatches; None on a rank without data."""
        return self._plan

    @property
    def counts(self) -> GlobalCounts:
        """Counts of the global batch. Raises LossAggError on a rank that cannot know them."""
        if self._plan is not None:
            return self._plan.counts
        if self._known_counts is not None:
            first = self._context.objective.mask_keys[0]
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
        """
        if self._reported_empty is not None:
            return self._reported_empty
        objective, coefficients = self._context.objective, self._context.coefficients
        by_mask = self._known_counts
        if self._plan is not None and self._plan.counts_are_known:
            by_mask = {key: self._plan.counts_of(key) for key in objective.mask_keys}
        if by_mask is not None:
            return int(num_trained_tokens(objective, coefficients, by_mask)) == 0
        raise LossAggError(
            "is_empty is not known yet on a rank without data; call step.report(...) first, on "
            "every rank."
        )

    @property
    def is_validated(self) -> bool:
        """Whether `validate` has looked at the last run of the schedule."""
        return self._record.is_validated

    @property
    def computes_loss(self) -> bool:
        """Whether `loss_func` runs on this rank once per microbatch, in Python."""
        return self._context.groups.is_last_stage and self._context.counts_loss_calls

    @property
    def is_forward_only(self) -> bool:
        """Whether the step is evaluated and never trained on."""
        return self._context.forward_only

    @property
    def num_loss_calls(self) -> int:
        """How often `loss_func` ran in this pass."""
        return self._record.num_loss_calls

    @property
    def microbatches(self) -> list[dict[str, Any]]:
        """Shallow copies of this rank's microbatches with weights; [] on a rank without data."""
        if self._plan is None:
            return []
        assert isinstance(self._plan, WeightPlan)  # streamed steps have no list
        return [self._plan.microbatch(i) for i in range(len(self._plan))]

    def data_iterator(self, num_chunks: int = 1) -> list[Iterator[dict[str, Any]] | None]:
        """Fresh iterators for the schedule, one per model chunk; starts a new pass over the step.

        Each yields the same microbatches as shallow copies with their weights. On a rank without
        data the list holds None, as Megatron's own loaders give.
        """
        if num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1 (len(model)), got {num_chunks}.")
        self.start_pass()
        if self._begin_pass is not None:
            self._begin_pass(self)
        if self._plan is None:
            return [None] * num_chunks
        return [self._iterate(self.add_iterator()) for _ in range(num_chunks)]

    def with_weights(self, microbatch: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A shallow copy of microbatch `index` with its weights, on a rank with data."""
        assert self._plan is not None
        return self._plan.with_weights(microbatch, index)

    def start_pass(self) -> None:
        """Forget what an earlier run of the schedule over this step did."""
        self._record = PassRecord()

    def add_iterator(self) -> TakenCount:
        """Register one more iterator; it counts there what it hands out."""
        if self._record.is_validated:
            self.start_pass()
        self._record.taken.append(TakenCount())
        return self._record.taken[-1]

    def _iterate(self, taken: TakenCount) -> Iterator[dict[str, Any]]:
        assert isinstance(self._plan, WeightPlan)
        for index in range(len(self._plan)):
            taken.value += 1
            yield self._plan.microbatch(index)
        raise LossAggError(
            f"More than the {len(self._plan)} microbatches of this step were asked for. Call the "
            "schedule with num_microbatches=step.num_microbatches, and step.data_iterator(...) "
            "anew for each run; a loop of your own goes over step.microbatches."
        )

    def loss_func(
        self, microbatch: Mapping[str, Any], output_tensor: Any, non_loss_data: bool = False
    ) -> Any:
        """The `loss_func` of a Megatron schedule. No collective, no host sync, no branch on data.

        S = sum of w * l over this rank's part of the microbatch. Bind the microbatch:
        `partial(step.loss_func, microbatch)`.

        Args:
            microbatch: what the data iterator gave, sliced for context parallelism where that is
                on.
            output_tensor: the last stage's output, passed on to `loss_fn`.
            non_loss_data: what `collect_non_loss_data=True` sets; then only the report is returned.

        Returns:
            By regime, see `schedule`: R1 (S * M * D, report), R2 (S * M * D * C, 1, report), R3
            (S * T, number of valid tokens as int32, report), R4 (S * M / C, report). The report is
            a copy that the schedule's in-place rescaling does not reach: {"loss": [numerator,
            denominator]}, to be summed by `report` or Megatron-LM's train_step.
        """
        context, contract = self._context, self._context.contract
        self._check_gradients_are_wanted()
        weights = [weights_of(microbatch, key) for key in context.weights_keys]
        sums = context.objective.sums_of(
            output_tensor,
            microbatch,
            weights,
            context.coefficients,
            rows_are_sequences=context.rows_are_sequences,
        )
        if self._record.is_validated:
            self.start_pass()
        self._record.add_loss_call(weights)
        if self._plan is None:
            self._record.see_tokens(num_trained_tokens_seen(weights, context))
        num_tokens = None
        if contract.regime == "R3" or context.pairs_by_tokens:
            num_tokens = num_valid_tokens(microbatch, weights, context)
            self._record.num_tokens.append(num_tokens)
        report = self._reported(sums, num_tokens, microbatch, weights)
        if non_loss_data:
            return report
        loss = with_graph(sums.total, output_tensor, context.groups) * contract.loss_factor(
            self.num_microbatches
        )
        self._record.returned.append((sums.values, loss.detach()))  # an alias
        if contract.regime == "R3":
            return loss, num_tokens, report
        if contract.returns_num_tokens:
            return loss, torch.ones_like(loss, dtype=torch.int32), report
        return loss, report

    def _check_gradients_are_wanted(self) -> None:
        context = self._context
        if context.divides_later and not torch.is_grad_enabled():
            raise LossAggError(
                "denominators='deferred' divides when gradients are finalized, which a run "
                "without gradients does not do. Evaluate with another LossAggregator, which counts "
                "first (denominators='counted')."
            )
        if context.forward_only and torch.is_grad_enabled():
            raise LossAggError(
                "This stream was wrapped with forward_only=True, and its loss is computed with "
                "gradients on. Evaluate under torch.no_grad(), or wrap the stream without it."
            )

    def _reported(
        self,
        sums: Sums,
        num_tokens: Tensor | None,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
    ) -> MicrobatchReport:
        """What `loss_func` reports; kept, as some of it is known only when gradients are final."""
        context, objective = self._context, self._context.objective
        share = context.share(self.num_microbatches)
        divisors = None
        if context.sees_weights:  # a captured graph would keep those of its first step
            divisors = microbatch.get(METRIC_DIVISORS)
            divisors = self.metric_divisors if divisors is None else divisors
        denominators: list[Tensor | float] = []
        if divisors is None and objective.metric_sums:
            denominators = metric_denominators(weights, context, share)
        report = microbatch_report(
            sums,
            objective.names,
            num_tokens=num_tokens if context.pairs_by_tokens else None,
            share=share,
            copies=context.contract.cp_copies,
            divisors=divisors,
            metric_denominators=denominators,
        )
        self._record.reports.append(report)
        return report

    @property
    def metric_divisors(self) -> Tensor | None:
        """What sums of metrics are divided by; None where it is not known, or there are none."""
        return None if self._plan is None else self._plan.metric_divisors

    def divide_reports(self, gradient_factor: float, divisors: Tensor | None) -> None:
        """Divide what `loss_func` reported by counts that came with final gradients, in place.

        Args:
            gradient_factor: what gradients were multiplied by.
            divisors: of metric sums, float64 [number of them]; None if there are none.
        """
        self.is_counted = True
        for report in self._record.reports:
            report.multiply_values(gradient_factor)
            if divisors is not None:
                report.divide_metrics(divisors, self._context.share(self.num_microbatches))

    def validate(self, num_tokens: Tensor | None = None) -> None:
        """Check the last run of the schedule: one all-reduce over dp x cp, on the last stage only.

        Call it on every rank before `optimizer.step()`; what happens afterwards is a new run. It
        compares the microbatches that the schedule took with M, what the schedule did to the
        returned loss with what the regime says, and the sum of all weights with the mode's
        checksum. It waits for the device.

        Args:
            num_tokens: the tokens that the schedule summed up on this rank for
                `finalize_model_grads` (R3), if they are known.

        Raises:
            LossAggError: on every rank of the group if one of them found a fault; the gradients are
                wrong then and the optimizer must not step.
        """
        context, groups = self._context, self._context.groups
        if self._record.is_validated:
            num_tokens = None  # it belongs to a run of another step
        self._record.is_validated = True
        loss_is_expected = groups.is_last_stage and context.counts_loss_calls
        problems = local_problems(
            self._record,
            context.contract,
            self.num_microbatches,
            loss_is_expected=loss_is_expected,
            schedule_num_tokens=num_tokens if context.sees_weights else None,
        )
        if self._plan is not None:
            problems += self._count_problems()
        if not groups.is_last_stage:
            raise_problems(problems)
            return
        sums = check_with_others(self._record, problems, self._plan, context)
        self._complete_reports(sums)

    def _complete_reports(self, sums: GroupSums) -> None:
        """What a host sums up and no microbatch could know: an all-reduce over dp x cp of extremes.

        Minima and maxima of the global batch, and the value 0 where there is no token.
        """
        context, reports = self._context, self._record.reports
        share = context.share(self.num_microbatches)
        if context.pairs_by_tokens and sums.num_tokens == 0:
            for report in reports:
                report.divide_by_share(share)
        if not context.objective.extremes or not context.sees_weights:
            return
        found = [report.extremes.double() for report in reports if report.extremes is not None]
        num_extremes = len(context.objective.extremes)
        largest = torch.full((num_extremes,), -torch.inf, dtype=torch.float64)
        if found:
            largest = torch.stack(found).max(dim=0).values
        largest = largest.to(communication_device(context.groups.dp_cp, largest.device))
        largest = all_reduce_extremes(largest, context.groups.dp_cp)
        values = context.objective.extreme_values(largest.tolist())
        for report in reports:
            report.set_extremes(values, share)

    def _count_problems(self) -> list[str]:
        assert self._plan is not None
        problems = []
        try:
            self._plan.check_counts()
        except LossAggError as error:
            problems.append(str(error).rstrip("."))
        if self._context.contract.regime == "R3" and self._plan.counts_are_known:
            num_tokens = int(self._plan.counts.num_tokens)
            if num_tokens > MAX_NUM_TOKENS_R3:
                problems.append(
                    f"the global batch has {num_tokens} valid tokens, but Megatron sums num_tokens "
                    f"in int32 (at most {MAX_NUM_TOKENS_R3}) when calculate_per_token_loss is on. "
                    "Set calculate_per_token_loss=False"
                )
        return problems

    def report(
        self,
        forward_data_store: Sequence[Mapping[str, Tensor]],
        *,
        broadcast_over_pipeline: bool = True,
    ) -> dict[str, float]:
        """The step's values: an all-reduce over dp x cp on the last stage, a broadcast over pp.

        Every rank calls it with what its schedule returned.

        Returns:
            {"loss": J, ...}, the same on every rank: the global objective that was optimised, then
            the value of every term (without its coefficient) and of every metric; with
            `report_counts` also num_tokens, num_seqs (B as the mode counts it), response_length
            (T/B) and masked_fraction (1 - T / positions of the masks). A minimum or maximum over no
            token is NaN. {} on earlier stages with `broadcast_over_pipeline=False`.
        """
        context, objective = self._context, self._context.objective
        counts, problem = self._packed_counts()
        totals = reduce_reports(
            forward_data_store,
            objective.names,
            context.groups,
            num_reports=self.num_microbatches if context.counts_loss_calls else None,
            counts=counts,
            num_counts=num_step_counts(objective, reports_counts=context.reports_counts),
            needs_counts=needs_step_counts(objective, reports_counts=context.reports_counts),
            tokens_seen=self._record.tokens_seen,
            problem=problem,
            broadcast_over_pipeline=broadcast_over_pipeline,
        )
        if totals is None:
            return {}
        if totals.counts is None:
            known = StepCounts.not_needed(totals.tokens_seen, objective)
        else:
            known = StepCounts.unpack(totals.counts, objective)
        self._reported_empty = known.trained_tokens == 0
        found = totals.values(objective.names, known.value_factors, known.divisors)
        extremes = objective.extreme_values(totals.extremes)
        found |= dict(zip(objective.names.extremes, extremes, strict=True))
        return found | known.named_counts()

    def _count_evaluation(self) -> None:
        """Sum deferred counts that no gradient brings: over dp and tp, on the last stage."""
        context = self._context
        if self.is_counted or context.divides_later or not context.groups.is_last_stage:
            return
        assert self._plan is None or isinstance(self._plan, DeferredPlan)
        pending = sum_over_ranks(self._plan, context.groups)
        if self._plan is not None and pending is not None:
            self._plan.set_counts(pending)
        self.is_counted = True

    def _packed_counts(self) -> tuple[Tensor | None, str | None]:
        """Counts for a report where this rank has planned the step, or why it cannot tell them."""
        if not self._context.groups.is_last_stage:
            return None, None
        try:
            self._count_evaluation()
            if self._plan is None:
                return None, None
            counts = pack_step_counts(
                self._plan,
                self._context.objective,
                self._context.coefficients,
                reports_counts=self._context.reports_counts,
            )
        except LossAggError as error:
            return None, str(error)
        return counts, None
