"""`DeferredDivision`: the gradients of all pipeline stages, over what the last one counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device
from megatron_lossagg.weights.deferred import sum_over_ranks


class DeferredDivision:
    """Divides the gradients of all pipeline stages by what the last one counted.

    It belongs to a model's config, not to an aggregator: stages before the last one cannot know
    whose step runs, so whenever gradients are finalized they learn the factor, which is 1 unless
    a deferred step ran.

    Args:
        groups: gives the process groups of the moment.
    """

    def __init__(self, groups: Callable[[], ParallelGroups]) -> None:
        self._groups = groups

    def __call__(self, chunks: list[Any], factor_here: Callable[[], float] | None) -> None:
        """Multiply the gradients of `chunks`: one all-reduce of 3 numbers over pp.

        Args:
            chunks: model chunks of this rank.
            factor_here: on the last stage, where a deferred step ran, counts and gives the factor.

        Raises:
            LossAggError: on every stage, if the last one could not count or a stage did not come.
        """
        groups = self._groups()
        problem: Exception | None = None
        factor, has_failed = 0.0, 0.0
        if groups.is_last_stage:
            factor = 1.0
            try:
                if factor_here is not None:
                    factor = factor_here()
                else:
                    sum_over_ranks(None, groups)
            except Exception as error:  # raised below: earlier stages wait for this one
                problem, has_failed = error, 1.0
        totals = torch.tensor([factor, has_failed, 1.0], dtype=torch.float64)
        totals = totals.to(communication_device(groups.pp, totals.device))
        all_reduce_sum(totals, groups.pp)
        factor, has_failed, num_stages = totals.tolist()
        if problem is not None:
            raise problem
        if has_failed or num_stages != groups.pp_size:
            raise LossAggError(
                "denominators='deferred': the last pipeline stage could not count the step; its "
                "message says why. Gradients are not divided: do not step the optimizer."
            )
        if factor != 1.0:
            for chunk in chunks:
                chunk.scale_gradients(factor)
