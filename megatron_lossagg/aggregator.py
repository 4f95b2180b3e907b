"""`LossAggregator`: the plugin that is given to a Megatron schedule as `loss_func`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_lossagg.config.loss_agg_config import LossAggConfig
from megatron_lossagg.config.options import LossAggOptions, show_options
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes.unread import judged_already
from megatron_lossagg.objective.compile.compiled import make_evaluation
from megatron_lossagg.objective.objective import LossFn, make_objective
from megatron_lossagg.objective.terms import LossTerm, TermFn
from megatron_lossagg.schedule.model_config import AT_FIRST_STEP, ConfigSource
from megatron_lossagg.step.host_side import HostSide
from megatron_lossagg.step.planner import StepRequest
from megatron_lossagg.step.settings import Settings
from megatron_lossagg.step.step import Step
from megatron_lossagg.step.stream_options import (
    StreamOptions,
    pairs_by_tokens,
)
from megatron_lossagg.weights.microbatch import (
    Microbatch,
    check_microbatches,
    resolve_num_microbatches,
)


@show_options
class LossAggregator(HostSide):
    """Aggregates token losses exactly, whatever the layout, inside a Megatron schedule.

    J = sum over the global batch of w * l, with the weights of `modes`. Two ways to use it: plan
    each step with `begin_step` when the loop has its microbatches, or `wrap` the data iterator when
    a trainer owns the schedule.

    Args:
        loss_fn: (output_tensor, microbatch) -> the loss of every token, of the shape of that
            microbatch's mask, floating point, not reduced; with `metrics` (losses, {name: values}).
            With `terms` it may be None, or prepare what all terms share (log-probabilities, say):
            what it returns is the first argument of each term's own `loss_fn`.
        terms: the summands of the objective, see `LossTerm`.
        metrics: name -> normaliser of the metrics that `loss_fn` returns, see `LossTerm`.
        model_config: the model's `TransformerConfig`, whose `calculate_per_token_loss` selects the
            regime; or a function that gives it when it is first needed. Left out,
            `make_forward_step` of the Megatron-LM adapter takes the model's own at the first step.
        groups: process groups; None reads Megatron's parallel state, at each step.
        **options: those of `LossAggOptions`, which says what each does: loss_agg_mode (not with
            `terms`, which have their own), loss_scale_factor, norm_semantics, sequence_count,
            cp_gradient, returns, weights_key, weight_dtype, masks_are_cp_sliced, contract,
            denominators, checks, report_counts, compile.

    Raises:
        ValueError: an option has a value that does not exist, or L is missing or not above zero.
        TypeError: an unknown option, `loss_fn` cannot be called, `weight_dtype` cannot hold
            weights, or `model_config` is not a model's config.
    """

    def __init__(
        self,
        loss_fn: LossFn | None = None,
        *,
        terms: Sequence[LossTerm] | None = None,
        metrics: Mapping[str, str] | None = None,
        model_config: Any = AT_FIRST_STEP,
        groups: ParallelGroups | None = None,
        **options: Any,
    ) -> None:
        chosen = LossAggOptions.of_keywords(options)
        objective = make_objective(
            loss_fn,
            terms,
            loss_agg_mode=chosen.loss_agg_mode,
            options=chosen,
            metrics=metrics,
            report_counts=chosen.report_counts,
        )
        evaluate = make_evaluation(objective, compile=chosen.compile)
        source = ConfigSource(model_config)
        super().__init__(Settings(chosen, objective, evaluate, source, groups))

    @classmethod
    def from_config(
        cls,
        loss_fn: LossFn | Mapping[str, TermFn],
        loss_agg_config: LossAggConfig,
        model_config: Any = AT_FIRST_STEP,
        *,
        groups: ParallelGroups | None = None,
        prepare: LossFn | None = None,
        metrics: Mapping[str, str] | None = None,
    ) -> LossAggregator:
        """Build one from a `LossAggConfig` (a YAML file, say) and the model's config.

        Args:
            loss_fn: of the constructor; with terms a mapping from the name of each to its function.
            loss_agg_config: the options.
            model_config: of the constructor.
            groups: of the constructor.
            prepare: with terms, what the constructor calls `loss_fn`: made once for all of them.
            metrics: of the constructor, without terms.

        Returns:
            The aggregator.

        Raises:
            ValueError: `prepare` without terms, or a term without its function.
        """
        terms = loss_agg_config.loss_terms(loss_fn) if loss_agg_config.terms else None
        if terms is None and prepare is not None:
            raise ValueError("prepare is for terms; without them do its work in loss_fn.")
        only: Any = loss_fn if terms is None else prepare
        others = {"model_config": model_config, "groups": groups}
        with judged_already():
            arguments = loss_agg_config.aggregator_arguments()
            return cls(only, terms=terms, metrics=metrics, **others, **arguments)

    def begin_step(
        self,
        microbatches: Sequence[Microbatch] | None = None,
        *,
        num_microbatches: int | None = None,
        counts: GlobalCounts | Mapping[str, GlobalCounts] | None = None,
        num_units: int | None = None,
        iteration: int | None = None,
    ) -> Step:
        """Plan a step: starts one all-reduce of 256 bytes over the data-parallel group.

        It does not wait for it: the first weights do, so a call before the step ahead of it runs
        hides the all-reduce on every stage. With `counts`, which all ranks pass or none, nothing is
        communicated. Every rank that holds data calls it with its own microbatches; a rank without
        data (middle pipeline stages, tensor-parallel ranks that get theirs by broadcast) passes
        None and the number its schedule runs.

        Args:
            microbatches: dicts of tensors with "loss_mask" [b, s], or [1, t] with "cu_seqlens" (and
                "cu_seqlens_padded") for packed sequences, and optionally "sample_mask" [b], 0 for a
                row that only pads the batch; at full length, before any context-parallel slicing.
                They are not changed.
            num_microbatches: M, needed without microbatches.
            counts: counts of the global batch, if the caller already knows them; with several
                masks a mapping from mask_key to counts.
            num_units: U, the units of the global batch, in modes with units (`unit_ids` in each
                microbatch); then a second all-reduce of 16 * U bytes runs.
            iteration: the step's number, where a term's coefficient is a schedule.

        Returns:
            The step, whose counts are under way.

        Raises:
            ValueError: microbatches that cannot be counted.
            TypeError: something else than microbatches.
            LossAggError: none where the loss is computed, or a configuration that cannot be
                honoured.
        """
        self._planner.check_is_counted()
        if self._must_measure:
            self.measure()
        if microbatches is None:
            num_microbatches = self._planner.without_data(num_microbatches)
        else:
            num_microbatches = check_microbatches(microbatches, num_microbatches)
        step = self._planner.plan(
            StepRequest(
                num_microbatches=num_microbatches,
                microbatches=microbatches,
                counts=self._planner.counts_by_mask(counts),
                num_units=num_units,
                iteration=iteration,
                begins=_weakly(self._enter_planned),  # a step keeps no aggregator alive
            )
        )
        self.install_finalize_hook()
        return step

    def wrap(
        self,
        data_iterator: Any,
        *,
        num_microbatches: int | Callable[[], int],
        num_units: int | Callable[[], int] | None = None,
        iteration: Callable[[], int] | None = None,
        forward_only: bool = False,
        evaluation_average: str | None = None,
    ) -> Iterator[dict[str, Any]] | list[Any] | None:
        """Wrap a trainer's iterator: one all-reduce over dp at the first `next` of a step.

        It takes the step's M microbatches at once, counts them and yields shallow copies with their
        weights. From the first step on, `model_config.finalize_model_grads_func` also runs the
        checks of `Step.validate` once per step, so that they happen before the optimizer steps.
        With deferred denominators nothing is counted ahead; the hook is set when the aggregator is
        built or by this call, which every rank then makes, after `finalize_model_grads_func` was
        set. If an exception interrupts a step, see `abandon_step`.

        Args:
            data_iterator: an iterator of microbatches, a list of them (one per model chunk; they
                yield the same sequence, or are one object), or None on a rank without data.
            num_microbatches: what the schedule is called with, or a function that gives it.
            num_units: as in `begin_step`, or a function that gives it.
            iteration: a function that gives the step's number, where a coefficient is a schedule.
                Each wrapped stream has its own.
            forward_only: the stream is evaluated, under `torch.no_grad()`, and never trained on.
            evaluation_average: what a host gets that sums the reported pairs of several evaluated
                steps before it divides: "steps" (default), the mean of their J, or "tokens",
                sum_k T_k J_k / sum_k T_k. With `forward_only` alone, and in every regime the same;
                with deferred denominators it is "tokens".

        Returns:
            The wrapped iterator; None for None; a list for a list.

        Raises:
            ValueError, TypeError: a wrong option. LossAggError: denominators are deferred and
                nothing could divide by them.
        """
        if self._must_measure:
            self.measure()
        if not callable(num_microbatches):
            resolve_num_microbatches(num_microbatches)
        by_tokens = pairs_by_tokens(forward_only, evaluation_average)
        options = StreamOptions(num_microbatches, num_units, iteration, forward_only, by_tokens)
        if not self._settings.is_deferred:
            return self._stream.wrap(data_iterator, options, self._plan_step)
        if forward_only:
            self._planner.check_evaluates_deferred(evaluation_average)
            options = replace(options, pairs_by_tokens=True)
        self._finalizer.check_is_set(self.model_config)
        self.install_finalize_hook()
        return self._stream.wrap(data_iterator, options, self._plan_step, one_by_one=True)

    def loss_func(
        self, microbatch: Mapping[str, Any], output_tensor: Any, non_loss_data: bool = False
    ) -> Any:
        """`Step.loss_func` of the wrapped step that runs. No collective, no host sync.

        LossAggError says that nothing was planned: `wrap` was not called on this rank.
        """
        objective = self._settings.objective
        step = self._stream.step_for_loss(
            self._plan_step, reads_iteration=objective.has_coefficient_schedules
        )
        self._finalizer.enter(begins=False)
        try:
            return step.loss_func(microbatch, output_tensor, non_loss_data)
        except Exception:
            self.abandon_step()
            raise

    def report(
        self,
        forward_data_store: Sequence[Mapping[str, Tensor]],
        *,
        broadcast_over_pipeline: bool = True,
    ) -> dict[str, float]:
        """`Step.report` of a wrapped step: an all-reduce over dp x cp, and a broadcast over pp.

        Every rank calls it with what its schedule returned, after the run and before the next one.
        LossAggError says that no step has run on this rank, where the loss is computed.
        """
        step = self._stream.active or self._receiver()
        return step.report(forward_data_store, broadcast_over_pipeline=broadcast_over_pipeline)

    def _enter_planned(self, step: Step) -> None:
        """A run of a step of `begin_step` begins: no wrapped step is meant until one begins."""
        self._stream.leave()
        self._planned = step
        self._finalizer.enter()

    def _plan_step(
        self, options: StreamOptions, microbatches: Sequence[Microbatch] | None, num: int
    ) -> Step:
        """A step of a wrapped stream; without microbatches deferred, or of a rank without data."""
        come_later = self._settings.is_deferred and self._stream.has_data
        step = self._planner.plan(options.request(microbatches, num, come_later=come_later))
        self.install_finalize_hook()
        self._planned = None
        return step


def _weakly(method: Callable[[Step], None]) -> Callable[[Step], None]:
    """Calls a bound method while its object lives."""
    reference = weakref.WeakMethod(method)

    def call(step: Step) -> None:
        if (alive := reference()) is not None:
            alive(step)

    return call
