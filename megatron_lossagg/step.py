"""One optimizer step as the caller sees it: iterators, loss function, checks, report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.count_metrics import NUM_COUNT_FACTS, count_facts, count_metrics
from megatron_lossagg.deferred import DeferredPlan
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.global_counts import GlobalCounts
from megatron_lossagg.loss import weights_of
from megatron_lossagg.plan import WeightPlan
from megatron_lossagg.record import (
    PassRecord,
    TakenCount,
    check_with_others,
    local_problems,
    raise_problems,
)
from megatron_lossagg.report import MicrobatchReport, reduce_reports
from megatron_lossagg.schedule import MAX_NUM_TOKENS_R3
from megatron_lossagg.step_context import StepContext


class Step:
    """A planned step. Made by `LossAggregator.begin_step`.

    Attributes:
        num_microbatches: M, what the schedule must be called with on this rank.
    """

    def __init__(
        self,
        context: StepContext,
        plan: WeightPlan | DeferredPlan | None,
        num_microbatches: int,
        known_counts: Mapping[str, GlobalCounts] | None = None,
    ) -> None:
        self._context = context
        self._plan = plan
        self._known_counts = known_counts
        self.num_microbatches = num_microbatches
        self._record = PassRecord()
        self._reported_empty: bool | None = None

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
            return self._known_counts[self._context.objective.mask_keys[0]]
        raise LossAggError(
            "This rank was given no microbatches, so it takes part in no count. Read counts on a "
            "rank with data, or pass counts=GlobalCounts(...) to begin_step on every rank."
        )

    @property
    def is_empty(self) -> bool:
        """Whether no token of the whole global batch is valid: skip the optimizer then.

        Waits for the device. On a rank without data it is known only after `report`.
        """
        if self._reported_empty is not None:
            return self._reported_empty
        if self._plan is not None or self._known_counts is not None:
            return int(self.counts.num_tokens) == 0
        raise LossAggError(
            "is_empty is not known yet on a rank without data; call step.report(...) first, on "
            "every rank."
        )

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
        if self._plan is None:
            return [None] * num_chunks
        return [self._iterate(self.add_iterator()) for _ in range(num_chunks)]

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
        if context.divides_later and not torch.is_grad_enabled():
            raise LossAggError(
                "denominators='deferred' divides when gradients are finalized, which a run "
                "without gradients does not do. Evaluate with another LossAggregator, which counts "
                "first (denominators='counted')."
            )
        weights = [weights_of(microbatch, key) for key in context.weights_keys]
        sums = context.objective.sums_of(output_tensor, microbatch, weights, context.coefficients)
        if self._record.is_validated:
            self.start_pass()
        self._record.add_loss_call(weights)

        values = sums.values if contract.cp_copies == 1 else sums.values / contract.cp_copies
        num_tokens = (
            self._num_tokens(weights[0], sums.total) if contract.returns_num_tokens else None
        )
        if contract.regime == "R3":
            assert num_tokens is not None
            denominators = num_tokens.to(values.dtype).expand_as(values)
        else:
            share = 1.0 / (self.num_microbatches * context.groups.dp_cp_size)
            denominators = torch.full_like(values, share)
        packed = torch.stack([values, denominators], dim=1)
        report = MicrobatchReport(context.objective.sum_names, packed, sums.extremes)
        self._record.reports.append(packed)
        if non_loss_data:
            return report
        loss = sums.total * contract.loss_factor(self.num_microbatches)
        self._record.returned.append((sums.values, loss.detach()))  # an alias
        if num_tokens is None:
            return loss, report
        if contract.regime == "R3" and loss.requires_grad:
            self._record.num_tokens.append(num_tokens)
        return loss, num_tokens, report

    def _num_tokens(self, weights: Tensor, total: Tensor) -> Tensor:
        """What the schedule divides by, int32 []: 1 in R2, the valid tokens in R3."""
        context = self._context
        if context.contract.regime != "R3":
            return torch.ones_like(total, dtype=torch.int32)
        num_tokens = (weights != 0).sum(dtype=torch.int32)
        # A token is counted once over context-parallel ranks.
        if context.contract.cp_copies > 1 and context.groups.cp_rank > 0:
            return torch.zeros_like(num_tokens)
        return num_tokens

    def divide_reports(self, gradient_factor: float) -> None:
        """Multiply what `loss_func` reported by the factor that gradients got, in place."""
        for packed in self._record.reports:
            packed[:, 0] *= gradient_factor

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
        check_with_others(
            self._record,
            problems,
            self._plan,
            context.contract,
            groups,
            num_weightings=len(context.weights_keys),
            check_sum=context.sees_weights,
            compare_with_plan=not context.objective.has_checksums,
            plan_copies=context.plan_copies,
        )

    def _count_problems(self) -> list[str]:
        assert self._plan is not None
        problems = []
        try:
            self._plan.check_counts()
        except LossAggError as error:
            problems.append(str(error).rstrip("."))
        if self._context.contract.regime == "R3" and self._plan.expected_weight_sums() is not None:
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
        totals = reduce_reports(
            forward_data_store,
            objective.sum_names,
            context.groups,
            num_extremes=len(objective.extremes),
            num_reports=self.num_microbatches if context.counts_loss_calls else None,
            evidence_of_tokens=self._evidence_of_tokens(),
            facts=count_facts(self._plan, objective) if context.reports_counts else None,
            num_facts=NUM_COUNT_FACTS if context.reports_counts else 0,
            broadcast_over_pipeline=broadcast_over_pipeline,
        )
        if totals is None:
            return {}
        self._reported_empty = totals.evidence == 0
        found = objective.values_of(totals)
        if context.reports_counts:
            found |= count_metrics(totals.facts)
        return found

    def _evidence_of_tokens(self) -> Tensor:
        """Above zero, after a sum over ranks, exactly if the global batch has a valid token."""
        if self._plan is not None or self._known_counts is not None:
            return self.counts.num_tokens.double()
        if self._record.weight_sums:
            return torch.stack(self._record.weight_sums)[:, 0].sum()
        return torch.zeros((), dtype=torch.float64)
