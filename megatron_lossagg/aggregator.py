"""`LossAggregator`: the plugin that is given to a Megatron schedule as `loss_func`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.config.loss_agg_config import LossAggConfig
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import (
    ParallelGroups,
    broadcast_from_first,
    broadcast_from_last,
    communication_device,
)
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.objective.compile.compiled import make_evaluation
from megatron_lossagg.objective.objective import LossFn, make_objective
from megatron_lossagg.objective.terms import LossTerm, TermFn
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.schedule.measure import Measurement
from megatron_lossagg.schedule.model_config import AT_FIRST_STEP, ConfigSource
from megatron_lossagg.step.finalizer import Finalizer
from megatron_lossagg.step.settings import Settings
from megatron_lossagg.step.step import Step
from megatron_lossagg.step.stream import StreamOptions, WrappedStream, resolve_num_microbatches
from megatron_lossagg.weights.deferred import DeferredPlan
from megatron_lossagg.weights.microbatch import METRIC_DIVISORS, Microbatch, check_microbatches
from megatron_lossagg.weights.plan import WeightPlan


class LossAggregator:
    """Aggregates token losses exactly, whatever the layout, inside a Megatron schedule.

    J = sum over the global batch of w * l, with the weights of `modes`. Two ways to use it: plan
    each step with `begin_step` when the loop has its microbatches, or `wrap` the data iterator when
    a trainer owns the schedule.

    Args:
        loss_fn: (output_tensor, microbatch) -> the loss of every token, of the shape of that
            microbatch's mask, floating point, not reduced; with `metrics` (losses, {name: values}).
            With `terms` it may be None, or prepare what all terms share (log-probabilities, say):
            what it returns is the first argument of each term's own `loss_fn`.
        loss_agg_mode: one of `modes.mode_names()`; not with `terms`, which have their own.
        terms: the summands of the objective, see `LossTerm`.
        metrics: name -> normaliser of the metrics that `loss_fn` returns, see `LossTerm`.
        report_counts: add num_tokens, num_seqs, response_length and masked_fraction to the report.
        model_config: the model's `TransformerConfig`, whose `calculate_per_token_loss` selects the
            regime; or a function that gives it when it is first needed. Left out,
            `make_forward_step` of the Megatron-LM adapter takes the model's own at the first step.
        groups: process groups; None reads Megatron's parallel state, at each step.
        loss_scale_factor: L, required by `seq-mean-token-sum-norm`.
        norm_semantics: "sum" (1/L) or "seq-mean" (1/(B*L)).
        sequence_count: B and U count "valid" sequences and units, or "nominal" ones.
        cp_gradient: where token losses come from under context parallelism: "local",
            "replicated-value" or "gathered" (see `ScheduleContract`).
        returns: "loss" (two values), "loss_and_num_tokens" (three) or "auto", by the config's flag.
        weights_key: the field of a microbatch that carries the weights. With "loss_mask" they
            replace the mask and travel wherever a trainer broadcasts and slices it.
        weight_dtype: dtype of the weights; float32 is exact to 6e-8.
        masks_are_cp_sliced: microbatches hold this context-parallel rank's part of each mask; then
            planning takes one more all-reduce, of n_s over the cp group, and `slice_for_cp` is not
            to be called.
        contract: "detect" reads the regime from the config; "measure" also drives a one-parameter
            model through the schedule at the first `begin_step` or `wrap`, which every rank must
            then call, and raises if anything scales otherwise.
        denominators: "counted" counts the step before its first microbatch; "deferred" divides when
            gradients are finalized, for a `wrap`ped stream whose step is not complete when it
            begins (see `deferred`).
        compile: run `loss_fn` (or those of `terms`), metrics and sums of a microbatch through
            `torch.compile`, once per family of shapes, with the gradient in the same pass where
            outputs are numbers per token (see `compiled`). A `loss_fn` beside `terms` stays
            outside. Where it fails, for want of a C++ compiler or at a `loss_fn` that cannot be
            traced, a warning says so and they run as without it.

    Raises:
        ValueError: an unknown option, or L missing or not above zero.
        TypeError: `loss_fn` cannot be called, `weight_dtype` cannot hold weights, or `model_config`
            is not a model's config.
    """

    def __init__(
        self,
        loss_fn: LossFn | None = None,
        *,
        loss_agg_mode: str | None = None,
        model_config: Any = AT_FIRST_STEP,
        terms: Sequence[LossTerm] | None = None,
        metrics: Mapping[str, str] | None = None,
        report_counts: bool = False,
        groups: ParallelGroups | None = None,
        loss_scale_factor: float | None = None,
        norm_semantics: str = "sum",
        sequence_count: str = "valid",
        cp_gradient: str = "local",
        returns: str = "auto",
        weights_key: str = "loss_weights",
        weight_dtype: torch.dtype = torch.float32,
        masks_are_cp_sliced: bool = False,
        contract: str = "detect",
        denominators: str = "counted",
        compile: bool = False,
    ) -> None:
        objective = make_objective(
            loss_fn,
            terms,
            loss_agg_mode=loss_agg_mode,
            loss_scale_factor=loss_scale_factor,
            norm_semantics=norm_semantics,
            sequence_count=sequence_count,
            metrics=metrics,
        )
        self._settings = Settings(
            objective=objective,
            evaluate=make_evaluation(objective, compile=compile),
            config_source=ConfigSource(model_config),
            groups=groups,
            cp_gradient=cp_gradient,
            returns=returns,
            weights_key=weights_key,
            weight_dtype=weight_dtype,
            masks_are_cp_sliced=masks_are_cp_sliced,
            contract=contract,
            denominators=denominators,
            reports_counts=report_counts,
        )
        self._must_measure = contract == "measure"
        self._stream = WrappedStream()
        self._finalizer = Finalizer(self._settings, self._stream)
        self._stream.watch_runs(self._finalizer.has_hook)
        self._received: Step | None = None
        self._planned: Step | None = None
        if self._settings.config_source.is_known:
            self._finalizer.watch(self.model_config)

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
        """
        terms = loss_agg_config.loss_terms(loss_fn) if loss_agg_config.terms else None
        if terms is None and prepare is not None:
            raise ValueError("prepare is for terms; without them do its work in loss_fn.")
        only: Any = loss_fn if terms is None else prepare
        return cls(
            only,
            terms=terms,
            metrics=metrics,
            model_config=model_config,
            groups=groups,
            **loss_agg_config.aggregator_arguments(),
        )

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
            num_units: U, the units of the global batch, in modes with units (`unit_ids` in each
                microbatch); then a second all-reduce of 16 * U bytes runs.
            counts: counts of the global batch, if the caller already knows them; with several
                masks a mapping from mask_key to counts.
            iteration: the step's number, where a term's coefficient is a schedule.

        Raises:
            ValueError, TypeError: microbatches that cannot be counted.
            LossAggError: none where the loss is computed, or a configuration that cannot be
                honoured.
        """
        if self._settings.is_deferred:
            raise LossAggError(
                "denominators='deferred' is for streams: begin_step has the step's microbatches "
                "and can count them. Use aggregator.wrap(iterator, num_microbatches=...), or "
                "denominators='counted'."
            )
        self._measure_once()
        context = self._settings.step_context(iteration)
        self.install_finalize_hook()
        given = self._settings.given_counts(counts)
        method = weakref.WeakMethod(self._enter_planned)  # a step keeps no aggregator alive

        def enter(step: Step) -> None:
            if (enter_planned := method()) is not None:
                enter_planned(step)

        if microbatches is None:
            groups = context.groups
            if num_microbatches is None:
                raise ValueError(
                    "begin_step needs microbatches, or num_microbatches on a rank that has no data."
                )
            if groups.is_last_stage and groups.tp_rank == 0:
                raise LossAggError(
                    "begin_step got no microbatches on a rank of the last pipeline stage "
                    "(tensor-parallel rank 0), where the loss is computed and its tokens are "
                    "counted. Give this rank its microbatches; one without sequences passes "
                    "microbatches whose masks are all 0."
                )
            return Step(context, None, resolve_num_microbatches(num_microbatches), given, enter)
        check_microbatches(microbatches, num_microbatches)
        options = self._settings.weight_options(context)
        plan = WeightPlan(microbatches, options, context.groups, given, num_units)
        return Step(context, plan, len(microbatches), begin_pass=enter)

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
        self._measure_once()
        if not callable(num_microbatches):
            resolve_num_microbatches(num_microbatches)
        options = StreamOptions(
            num_microbatches,
            num_units,
            iteration,
            forward_only,
            _pairs_by_tokens(forward_only, evaluation_average),
        )
        if not self._settings.is_deferred:
            return self._stream.wrap(data_iterator, options, self._plan_step)
        if forward_only and (self._settings.may_divide_later or evaluation_average == "steps"):
            raise LossAggError(
                "denominators='deferred' knows counts when gradients are finalized, so it cannot "
                "evaluate. Give the evaluated stream a LossAggregator of its own, with "
                "denominators='counted'. (Token-mean with calculate_per_token_loss on, which "
                "Megatron divides itself, can, with evaluation_average='tokens'.)"
            )
        if forward_only:
            options = replace(options, pairs_by_tokens=True)
        self._finalizer.check_is_set(self.model_config)
        self.install_finalize_hook()
        return self._stream.wrap(data_iterator, options, self._plan_step, one_by_one=True)

    def loss_func(
        self, microbatch: Mapping[str, Any], output_tensor: Any, non_loss_data: bool = False
    ) -> Any:
        """`Step.loss_func` of the step that a wrapped iterator is in. No collective, no host sync.

        Raises:
            LossAggError: nothing was planned: `wrap` was not called on this rank.
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

    def abandon_step(self) -> None:
        """Forget the wrapped step that an exception interrupted. Does not communicate.

        Wrapped iterators then go on with a whole step, the one after it. It happens by itself when
        `loss_func` raises, and when Megatron's own schedules are run again after any exception; a
        loop of another kind that catches one and goes on calls it on every rank.
        """
        self._finalizer.leave()
        self._stream.abandon()

    def validate(self, num_tokens: Tensor | None = None) -> None:
        """`Step.validate` of a wrapped step: one all-reduce over dp x cp on the last stage only.

        The first step installs it in `model_config.finalize_model_grads_func`, which gives it the
        `num_tokens` of the schedule; a loop without that hook calls it on every rank before the
        optimizer steps.
        """
        self._stream.validate(num_tokens)

    def report(
        self,
        forward_data_store: Sequence[Mapping[str, Tensor]],
        *,
        broadcast_over_pipeline: bool = True,
    ) -> dict[str, float]:
        """`Step.report` of a wrapped step: an all-reduce over dp x cp, and a broadcast over pp.

        Every rank calls it with what its schedule returned, after the run and before the next one.

        Raises:
            LossAggError: the loss is computed on this rank, and no step has run.
        """
        step = self._stream.active
        if step is None:
            if self._settings.current_groups().is_last_stage:
                raise LossAggError(
                    "report was called, but no wrapped step has run on this rank, where the loss "
                    "is computed. Run the schedule first, or use begin_step and step.report."
                )
            step = self._received = Step(self._settings.receiving_context(), None, 1)
        return step.report(forward_data_store, broadcast_over_pipeline=broadcast_over_pipeline)

    @property
    def is_empty(self) -> bool:
        """`Step.is_empty` of the wrapped step that ran last: skip the optimizer then.

        Waits for the device. On a rank without data it is known after `report`.
        """
        step = self._stream.active or self._received
        if step is None:
            raise LossAggError(
                "is_empty is not known on this rank: no wrapped step has run on it. Call "
                "aggregator.report(...) first, on every rank."
            )
        return step.is_empty

    def share_is_empty(self) -> bool:
        """`is_empty` of the step that ran last, on every rank: broadcasts over tp and over pp.

        That over tp is on the last stage. Steps of `begin_step` count as wrapped ones do.
        """
        groups = self._settings.current_groups()
        step = self._stream.active or self._planned
        has_plan = step is not None and step.plan is not None
        is_empty = float(step.is_empty) if step is not None and has_plan else 0.0
        box = torch.tensor([is_empty], dtype=torch.float64)
        if groups.is_last_stage:
            box = box.to(communication_device(groups.tp, box.device))
            broadcast_from_first(box, groups.tp)
        box = box.to(communication_device(groups.pp, box.device))
        broadcast_from_last(box, groups.pp)
        return bool(box.item())

    def with_shared_counts(self, microbatch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A microbatch with what its metrics are divided by: a broadcast over tp, without a sync.

        For a host whose tensor-parallel rank 0 alone has planned the step, and that sums reported
        pairs itself; without metrics, or without tensor parallelism, nothing is sent. Every
        tensor-parallel rank calls it on the stage that computes the loss, after rank 0 took the
        microbatch from its wrapped iterator.
        """
        groups = self._settings.current_groups()
        num_metrics = len(self._settings.objective.metric_sums)
        if num_metrics == 0 or groups.tp_size == 1 or self._settings.is_deferred:
            return microbatch  # deferred ones are shared when gradients are finalized
        step = self._stream.active
        found = None if groups.tp_rank > 0 or step is None else step.metric_divisors
        if found is None:
            found = torch.full((num_metrics,), torch.nan, dtype=torch.float64)
        found = found.to(communication_device(groups.tp, found.device), copy=True)
        broadcast_from_first(found, groups.tp)
        return {**microbatch, METRIC_DIVISORS: found}

    def install_finalize_hook(self, model_config: Any = None) -> None:
        """Let `finalize_model_grads_func` of the config run this aggregator's checks.

        Steps do it by themselves in the aggregator's `model_config`. Call it once for a config that
        is a copy of it, after `finalize_model_grads_func` was set there: a schedule reads that from
        the config of its first model chunk.
        """
        self._finalizer.watch(self.model_config if model_config is None else model_config)
        self._finalizer.enter()

    def use_model_config(self, model_config: Any) -> None:
        """Take the model's config where none was given; it stays what it was where one was.

        Raises:
            TypeError: not a model's config.
        """
        self._settings.config_source.set_default(model_config)

    def measure_at_first_step(self) -> None:
        """With contract="measure": let it happen when the first gradients are finalized.

        There every rank of the job is at one place and has its model chunks, also where a trainer
        owns the schedule. Every rank calls it before its first step.
        """
        if self._must_measure:
            self._must_measure = False
            self._finalizer.before_first_step = self._measure_chunks

    def _measure_chunks(self, chunks: list[Any]) -> None:
        self._finalizer.before_first_step = None
        self.measure(model=chunks)

    def measure(self, **options: Any) -> Measurement:
        """Communicates over all groups: see `ScheduleContract.measure`. Every rank must call it."""
        measurement = ScheduleContract.measure(
            self.model_config,
            self._settings.current_groups(),
            returns=self._settings.returns,
            cp_gradient=self._settings.cp_gradient,
            **options,
        )
        self._must_measure = False
        self._finalizer.measured_wrappers += tuple(map(type, options.get("model") or ()))
        return measurement

    @property
    def mode_spec(self) -> ModeSpec:
        """The mode of the main mask, and its options."""
        return self._settings.main_spec

    @property
    def model_config(self) -> Any:
        """The model's `TransformerConfig`. Raises LossAggError while it is not known."""
        return self._settings.model_config

    @property
    def has_model_config(self) -> bool:
        """Whether the model's config is known already."""
        return self._settings.config_source.is_known

    @property
    def can_evaluate(self) -> bool:
        """Whether a run without gradients gives J: not if these would be divided at the end."""
        return not self._settings.may_divide_later

    @property
    def denominators(self) -> str:
        """When counts are known: "counted" before a step, "deferred" at its end."""
        return self._settings.denominators

    @property
    def weights_key(self) -> str:
        """The field of a microbatch that carries the weights."""
        return self._settings.weights_key

    @property
    def weights_keys(self) -> tuple[str, ...]:
        """The fields that carry weights: `weights_key`, and one more per further mode or mask.

        A loop that broadcasts its microbatches over tensor-parallel ranks sends all of them. Where
        `weights_key` is "loss_mask" and no term uses that mask, this field keeps the mask itself.
        """
        objective = self._settings.objective
        return tuple(dict.fromkeys((self.weights_key, *objective.weights_keys(self.weights_key))))

    @property
    def must_measure(self) -> bool:
        """Whether contract="measure" was asked for and has not been done yet."""
        return self._must_measure

    def _measure_once(self) -> None:
        if self._must_measure:
            self.measure()

    def _enter_planned(self, step: Step) -> None:
        """A run of a step of `begin_step` begins: no wrapped step is meant until one begins."""
        self._stream.leave()
        self._planned = step
        self._finalizer.enter()

    def _plan_step(
        self, options: StreamOptions, microbatches: Sequence[Microbatch] | None, num: int
    ) -> Step:
        """A step of a wrapped stream; without microbatches deferred, or of a rank without data."""
        context = self._settings.step_context(
            None if options.iteration is None else options.iteration(),
            forward_only=options.forward_only,
            pairs_by_tokens=options.pairs_by_tokens,
        )
        self.install_finalize_hook()
        self._planned = None
        if microbatches is None:
            has_data = self._settings.is_deferred and self._stream.has_data
            weights = self._settings.weight_options(context)
            return Step(context, DeferredPlan(weights, num) if has_data else None, num)
        num_units = options.num_units() if callable(options.num_units) else options.num_units
        weights = self._settings.weight_options(context)
        plan = WeightPlan(microbatches, weights, context.groups, num_units=num_units)
        return Step(context, plan, len(plan))


def _pairs_by_tokens(forward_only: bool, evaluation_average: str | None) -> bool | None:
    """Of an evaluated stream; None for one that is trained on, where the regime decides."""
    if evaluation_average not in (None, "steps", "tokens"):
        raise ValueError(
            f"evaluation_average={evaluation_average!r} does not exist; expected 'steps' or "
            "'tokens'."
        )
    if forward_only:
        return evaluation_average == "tokens"
    if evaluation_average is not None:
        raise ValueError(
            "evaluation_average is for evaluated streams, whose reports a host adds up over "
            "several steps: pass forward_only=True with it."
        )
    return None
