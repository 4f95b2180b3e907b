"""`StepContext`: what a step knows besides its weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.step.settings import Settings


@dataclass(frozen=True)
class StepContext:
    """What a step shares with the others of its aggregator, and what holds at its moment.

    Attributes:
        settings: what the aggregator was built with.
        objective: terms and metrics.
        contract: the regime and its factors.
        groups: the process groups.
        weights_keys: the fields that carry the weights of each of the objective's weightings.
        coefficients: of the terms, at the step's iteration; () on a rank that runs no step of its
            own and only receives a report.
        forward_only: the step is evaluated and never trained on.
        pairs_by_tokens: the pairs of a report have n, the valid tokens of the microbatch, as their
            denominators, and numerators that go with it; else shares that sum to 1.
        divides_later: the weights lack their global divisor: gradients and reports get it when
            gradients are finalized.
        counts_loss_calls: whether `loss_func` runs once per microbatch, in Python.
        sees_weights: whether it runs in Python, so that the weights it saw can be summed.
    """

    settings: Settings
    objective: Objective
    contract: ScheduleContract
    groups: ParallelGroups
    weights_keys: tuple[str, ...]
    coefficients: tuple[float, ...]
    forward_only: bool = False
    pairs_by_tokens: bool = False
    divides_later: bool = False
    counts_loss_calls: bool = True
    sees_weights: bool = True

    @property
    def reports_counts(self) -> bool:
        """Whether `report` also tells the counts of the global batch."""
        return self.settings.options.report_counts

    @property
    def weights_key(self) -> str:
        """The field that carries the weights of the first weighting."""
        return self.settings.options.weights_key

    @property
    def plan_copies(self) -> int:
        """On how many context-parallel ranks the plan has each token."""
        return 1 if self.settings.options.masks_are_cp_sliced else self.contract.cp_size

    @property
    def rows_are_sequences(self) -> bool:
        """Whether `loss_func` sees whole rows, not those of a context-parallel chunk."""
        return self.groups.cp_size == 1 or self.contract.cp_copies > 1

    def share(self, num_microbatches: int) -> float:
        """1 / (M D C): one microbatch of one rank, of all."""
        return 1.0 / (num_microbatches * self.groups.dp_cp_size)
