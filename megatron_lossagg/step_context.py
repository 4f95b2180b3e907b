"""What a step needs to know of the aggregator that began it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.objective import Objective
from megatron_lossagg.schedule import ScheduleContract


@dataclass(frozen=True)
class StepContext:
    """What all steps of one aggregator share.

    Attributes:
        objective: terms and metrics.
        coefficients: of the terms, at this iteration.
        contract: the regime and its factors.
        groups: the process groups.
        weights_keys: the fields that carry the weights of each of the objective's weightings.
        reports_counts: whether `report` also tells the counts of the global batch.
        plan_copies: on how many context-parallel ranks the plan has each token.
        counts_loss_calls: whether `loss_func` runs once per microbatch, in Python.
        sees_weights: whether it runs in Python, so that the weights it saw can be summed.
        divides_later: the weights lack their global divisor: gradients and reports get it when
            gradients are finalized.
    """

    objective: Objective
    coefficients: tuple[float, ...]
    contract: ScheduleContract
    groups: ParallelGroups
    weights_keys: tuple[str, ...]
    reports_counts: bool = False
    plan_copies: int = 1
    counts_loss_calls: bool = True
    sees_weights: bool = True
    divides_later: bool = False
