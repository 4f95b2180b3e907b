"""`StepPlanner`: the one place where a step is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.refusals import (
    refuse_deferred,
    uses_full_iteration_cuda_graph,
    uses_hybrid_cp,
)
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.identity import options_identity, step_identity
from megatron_lossagg.step.settings import Settings
from megatron_lossagg.step.step import Step
from megatron_lossagg.weights.deferred import DeferredPlan
from megatron_lossagg.weights.microbatch import Microbatch, WeightOptions
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

    def plan(self, request: StepRequest) -> Step:
        """A step: with microbatches starts one all-reduce over dp, unless counts are given.

        Groups, regime and coefficients are those of the moment: none is remembered, so none can be
        stale.

        Raises:
            ValueError, TypeError: microbatches that cannot be counted, or counts that lack a mask.
            LossAggError: a configuration that cannot be honoured.
        """
        coefficients = self._settings.objective.coefficients(request.iteration)
        context = self._context(coefficients, request.forward_only, request.pairs_by_tokens)
        return Step(
            context,
            self._weights(request, context),
            request.num_microbatches,
            microbatches=request.microbatches or (),
            known_counts=request.counts,
            begins=request.begins,
        )

    def receiver(self) -> Step:
        """Of a rank that runs no step and only receives a report: no coefficient is evaluated."""
        return Step(self._context((), False, None), None, 1)

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

        Raises:
            ValueError: no number of them either. LossAggError: the loss is computed here.
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
        return num_microbatches

    def _context(
        self, coefficients: tuple[float, ...], forward_only: bool, pairs_by_tokens: bool | None
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
        if pairs_by_tokens is None:
            pairs_by_tokens = contract.weights_carry_num_tokens
        # A replayed CUDA graph does not enter Python; hybrid context parallelism calls once per
        # sample that it assigned to this rank.
        replayed = uses_full_iteration_cuda_graph(model_config)
        return StepContext(
            settings=settings,
            objective=settings.objective,
            contract=contract,
            groups=groups,
            weights_keys=self._weights_keys,
            coefficients=coefficients,
            forward_only=forward_only,
            pairs_by_tokens=pairs_by_tokens,
            divides_later=divides_later,
            counts_loss_calls=not (replayed or uses_hybrid_cp(model_config)),
            sees_weights=not replayed,
        )

    def _weights(self, request: StepRequest, context: StepContext) -> StepWeights | None:
        """The weights of this rank's microbatches; None where it has none."""
        if request.microbatches is None and not request.come_later:
            return None
        settings = self._settings
        options = WeightOptions(
            weightings=settings.objective.weightings,
            weights_keys=context.weights_keys,
            weight_dtype=settings.options.torch_weight_dtype,
            times_num_tokens=context.pairs_by_tokens and not settings.is_deferred,
            masks_are_cp_sliced=settings.options.masks_are_cp_sliced,
            identity=self._identity(context),
            metrics=settings.objective.metric_sums,
            keeps_mask=settings.objective.keeps_mask(settings.options.weights_key),
        )
        if request.microbatches is None:
            return DeferredPlan(options, request.num_microbatches)
        return WeightPlan(
            request.microbatches, options, context.groups, request.counts, request.num_units
        )

    @cached_property
    def _weights_keys(self) -> tuple[str, ...]:
        return self._settings.objective.weights_keys(self._settings.options.weights_key)

    @cached_property
    def _options_identity(self) -> dict[str, str]:
        return options_identity(self._settings.options, self._settings.objective)

    def _identity(self, context: StepContext) -> dict[str, str]:
        of_step = step_identity(
            context.contract,
            context.objective,
            context.coefficients,
            pairs_by_tokens=context.pairs_by_tokens,
        )
        return {**self._options_identity, **of_step}
