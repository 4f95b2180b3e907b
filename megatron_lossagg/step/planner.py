"""`StepPlanner`: the one place where a step is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lossagg.counts.given_counts import counts_by_mask
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.refusals import (
    refuse_deferred,
    uses_full_iteration_cuda_graph,
    uses_hybrid_cp,
)
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.identity import options_identity, step_identity
from megatron_lossagg.step.report import ReportShape
from megatron_lossagg.step.settings import Settings
from megatron_lossagg.step.step import Step
from megatron_lossagg.weights.deferred import DeferredPlan
from megatron_lossagg.weights.microbatch import Microbatch, WeightOptions, resolve_num_microbatches
from megatron_lossagg.weights.plan import WeightPlan
from megatron_lossagg.weights.step_weights import StepWeights


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What one step is planned from.

    Attributes:
        num_microbatches: M.
        microbatches: this rank's; None where it has no data, or where they come later.
        come_later: microbatches come one by one, and are counted as they do.
        counts: of the global batch by mask, where a driver gave them.
        num_units: U, in modes with units.
        iteration: at which coefficients are evaluated.
        forward_only: of `LossAggregator.wrap`.
        pairs_by_tokens: see `StepContext`; None: as the regime wants it for training.
        begins: called with the step when a run of the schedule over it begins.
    """

    num_microbatches: int
    microbatches: Sequence[Microbatch] | None = None
    come_later: bool = False
    counts: Mapping[str, GlobalCounts] | None = None
    num_units: int | None = None
    iteration: int | None = None
    forward_only: bool = False
    pairs_by_tokens: bool | None = None
    begins: Callable[[Step], None] | None = None


class StepPlanner:
    """Plans the steps of one aggregator, however their weights come about."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        options, objective = settings.options, settings.objective
        self._weight_options = WeightOptions(
            weightings=objective.weightings,
            weights_keys=objective.weights_keys(options.weights_key),
            weight_dtype=options.torch_weight_dtype,
            masks_are_cp_sliced=options.masks_are_cp_sliced,
            metrics=objective.metric_sums,
            keeps_mask=objective.keeps_mask(options.weights_key),
        )
        self._report_shape = ReportShape.of(objective, reports_counts=options.report_counts)
        self._identity = options_identity(options, objective)

    def plan(self, request: StepRequest) -> Step:
        """A step: with microbatches starts one all-reduce over dp, unless counts are given.

        Groups, regime and coefficients are those of the moment: none is remembered, so none can be
        stale.

        Args:
            request: what to plan from.

        Returns:
            The step.

        Raises:
            ValueError: microbatches that cannot be counted, or counts that lack a mask.
            TypeError: something else than microbatches.
            LossAggError: a configuration that cannot be honoured.
        """
        coefficients = self._settings.objective.coefficients(request.iteration)
        context = self._context(
            request.num_microbatches, coefficients, request.forward_only, request.pairs_by_tokens
        )
        return Step(
            context,
            self._weights(request, context),
            microbatches=request.microbatches or (),
            known_counts=request.counts,
            begins=request.begins,
        )

    def receiver(self) -> Step:
        """Of a rank that runs no step and only receives a report: no coefficient is evaluated."""
        return Step(self._context(1, (), False, None), None)

    def check_is_counted(self) -> None:
        """Raise LossAggError where `begin_step` is called with deferred denominators."""
        if self._settings.is_deferred:
            raise LossAggError(
                "denominators='deferred' is for streams: begin_step has the step's microbatches "
                "and can count them. Use aggregator.wrap(iterator, num_microbatches=...), or "
                "denominators='counted'."
            )

    def check_evaluates_deferred(self, evaluation_average: str | None) -> None:
        """Raise LossAggError where a stream with deferred denominators cannot be evaluated."""
        if self._settings.may_divide_later or evaluation_average == "steps":
            raise LossAggError(
                "denominators='deferred' knows counts when gradients are finalized, so it cannot "
                "evaluate. Give the evaluated stream a LossAggregator of its own, with "
                "denominators='counted'. (Token-mean with calculate_per_token_loss on, which "
                "Megatron divides itself, can, with evaluation_average='tokens'.)"
            )

    def without_data(self, num_microbatches: int | None) -> int:
        """M of a step of which this rank has no data.

        Args:
            num_microbatches: what the caller gave, or None.

        Returns:
            M.

        Raises:
            ValueError: no number of them either.
            LossAggError: the loss is computed here.
        """
        if num_microbatches is None:
            raise ValueError(
                "begin_step needs microbatches, or num_microbatches on a rank that has no data."
            )
        groups = self._settings.current_groups()
        if groups.is_last_stage and groups.tp_rank == 0:
            raise LossAggError(
                "begin_step got no microbatches on a rank of the last pipeline stage "
                "(tensor-parallel rank 0), where the loss is computed and its tokens are "
                "counted. Give this rank its microbatches; one without sequences passes "
                "microbatches whose masks are all 0."
            )
        return resolve_num_microbatches(num_microbatches)

    def counts_by_mask(self, counts: Any) -> dict[str, GlobalCounts] | None:
        """Counts that a caller passed to `begin_step`, by mask; see `given_counts`."""
        return None if counts is None else counts_by_mask(counts, self._weight_options.mask_keys)

    def _context(
        self,
        num_microbatches: int,
        coefficients: tuple[float, ...],
        forward_only: bool,
        pairs_by_tokens: bool | None,
    ) -> StepContext:
        settings, model_config = self._settings, self._settings.model_config
        groups = settings.current_groups()
        contract = settings.current_contract(groups)
        divides_later = settings.divides_later(contract)
        if settings.is_deferred:
            refuse_deferred(
                model_config,
                [weighting.spec for weighting in settings.objective.weightings],
                normalisers=[metric.normaliser for metric in settings.objective.metrics],
                divides_later=divides_later,
                masks_are_cp_sliced=settings.options.masks_are_cp_sliced,
            )
        # A replayed CUDA graph does not enter Python; hybrid context parallelism calls once per
        # sample that it assigned to this rank.
        replayed = uses_full_iteration_cuda_graph(model_config)
        is_by_tokens = contract.weights_carry_num_tokens
        cp_copies = contract.cp_copies
        of_step = step_identity(contract, settings.objective, coefficients)
        return StepContext(
            num_microbatches=num_microbatches,
            share=1.0 / (num_microbatches * groups.dp_cp_size),
            loss_factor=contract.loss_factor(num_microbatches),
            objective=settings.objective,
            evaluate=settings.evaluate,
            report_shape=self._report_shape,
            contract=contract,
            identity={**self._identity, **of_step},
            groups=groups,
            weights_keys=self._weight_options.weights_keys,
            main_mask_is_kept=self._weight_options.keeps_mask,
            coefficients=coefficients,
            cp_copies=cp_copies,
            mask_copies=1 if settings.options.masks_are_cp_sliced else contract.cp_size,
            rows_are_sequences=contract.cp_size == 1 or cp_copies > 1,
            reports_counts=settings.options.report_counts,
            is_deferred=settings.is_deferred,
            divides_later=divides_later,
            forward_only=forward_only,
            pairs_by_tokens=is_by_tokens if pairs_by_tokens is None else pairs_by_tokens,
            counts_loss_calls=not (replayed or uses_hybrid_cp(model_config)),
            sees_weights=not replayed,
        )

    def _weights(self, request: StepRequest, context: StepContext) -> StepWeights | None:
        """The weights of this rank's microbatches; None where it has none."""
        if request.microbatches is None and not request.come_later:
            return None
        averages = "by tokens" if context.pairs_by_tokens else "plain"
        identity = {**context.identity, "the average of reports over steps": averages}
        if request.microbatches is None:
            num_microbatches = request.num_microbatches
            return DeferredPlan(self._weight_options, num_microbatches, identity=identity)
        return WeightPlan(
            request.microbatches,
            self._weight_options,
            context.groups,
            identity=identity,
            times_num_tokens=context.pairs_by_tokens and not context.is_deferred,
            counts=request.counts,
            num_units=request.num_units,
        )
