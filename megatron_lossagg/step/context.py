"""`StepContext`: what a step knows besides its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.objective.evaluation import Evaluate
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.step.report import ReportShape


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a step shares with the others of its aggregator, and what holds at its moment.

    Attributes:
        num_microbatches: M, what the schedule must be called with on this rank.
        share: 1 / (M D C): one microbatch of one rank, of all.
        loss_factor: what S is multiplied by before it is returned.
        objective: terms and metrics.
        evaluate: what evaluates the objective on a microbatch.
        report_shape: what is reduced for a report.
        contract: the regime and its factors.
        identity: by option what must be equal on all ranks of the last stage, as text.
        groups: the process groups.
        weights_keys: the fields that carry the weights of each of the objective's weightings.
        main_mask_is_kept: the field of weights named `loss_mask` holds that mask itself.
        coefficients: of the terms, at the step's iteration; () on a rank that runs no step of its
            own and only receives a report.
        cp_copies: on how many context-parallel ranks one token's value is present.
        mask_copies: on how many of them each token's mask was planned.
        rows_are_sequences: `loss_func` sees whole rows, not those of a context-parallel chunk.
        reports_counts: `report` also tells the counts of the global batch.
        is_deferred: counts are known once gradients are finalized.
        divides_later: the weights lack their global divisor: gradients and reports get it when
            gradients are finalized.
        forward_only: the step is evaluated and never trained on.
        pairs_by_tokens: the pairs of a report have n, the valid tokens of the microbatch, as their
            denominators, and numerators that go with it; else shares that sum to 1.
        counts_loss_calls: `loss_func` runs once per microbatch, in Python.
        sees_weights: it runs in Python, so that the weights it saw can be summed.
    """

    num_microbatches: int
    share: float
    loss_factor: float
    objective: Objective
    evaluate: Evaluate
    report_shape: ReportShape
    contract: ScheduleContract
    identity: Mapping[str, str]
    groups: ParallelGroups
    weights_keys: tuple[str, ...]
    main_mask_is_kept: bool
    coefficients: tuple[float, ...]
    cp_copies: int
    mask_copies: int
    rows_are_sequences: bool
    reports_counts: bool
    is_deferred: bool
    divides_later: bool
    forward_only: bool
    pairs_by_tokens: bool
    counts_loss_calls: bool
    sees_weights: bool

    @property
    def computes_loss(self) -> bool:
        """Whether `loss_func` runs on this rank once per microbatch, in Python."""
        return self.groups.is_last_stage and self.counts_loss_calls
