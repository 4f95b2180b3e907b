"""What a step needs to know of the aggregator that began it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.objective.evaluation import Evaluate
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.schedule.contract import ScheduleContract


@dataclass(frozen=True)
class StepContext:
    """What a step shares with the others of its aggregator, and its coefficients.

    Attributes:
        objective: terms and metrics.
        evaluate: what evaluates the objective on a microbatch.
        coefficients: of the terms, at the step's iteration; () on a rank that runs no step of its
            own and only receives a report.
        contract: the regime and its factors.
        groups: the process groups.
        weights_key: the field that carries the weights of the first weighting.
        weights_keys: the fields that carry the weights of each of the objective's weightings.
        reports_counts: whether `report` also tells the counts of the global batch.
        plan_copies: on how many context-parallel ranks the plan has each token.
        counts_loss_calls: whether `loss_func` runs once per microbatch, in Python.
        sees_weights: whether it runs in Python, so that the weights it saw can be summed.
        is_deferred: counts are known once gradients are finalized.
        divides_later: the weights lack their global divisor: gradients and reports get it when
            gradients are finalized.
        forward_only: the step is evaluated and never trained on.
        pairs_by_tokens: the pairs of a report have n, the valid tokens of the microbatch, as their
            denominators, and numerators that go with it; else shares that sum to 1.
    """

    objective: Objective
    evaluate: Evaluate
    coefficients: tuple[float, ...]
    contract: ScheduleContract
    groups: ParallelGroups
    weights_key: str
    weights_keys: tuple[str, ...]
    reports_counts: bool = False
    plan_copies: int = 1
    counts_loss_calls: bool = True
    sees_weights: bool = True
    is_deferred: bool = False
    divides_later: bool = False
    forward_only: bool = False
    pairs_by_tokens: bool = False

    @property
    def rows_are_sequences(self) -> bool:
        """Whether `loss_func` sees whole rows, not those of a context-parallel chunk."""
        return self.groups.cp_size == 1 or self.contract.cp_copies > 1

    def share(self, num_microbatches: int) -> float:
        """1 / (M D C): one microbatch of one rank, of all."""
        return 1.0 / (num_microbatches * self.groups.dp_cp_size)
