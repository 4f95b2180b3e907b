"""`LossAggregator`: the plugin that is given to a Megatron schedule as `loss_func`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.config import LossAggConfig
from megatron_lossagg.deferred import DeferredPlan
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.finalizer import Finalizer
from megatron_lossagg.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.measure import Measurement
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.objective import LossFn, make_objective
from megatron_lossagg.plan import Microbatch, WeightPlan, check_microbatches
from megatron_lossagg.schedule import ScheduleContract
from megatron_lossagg.settings import Settings
from megatron_lossagg.step import Step
from megatron_lossagg.step_context import StepContext
from megatron_lossagg.stream import WrappedStream, resolve_num_microbatches
from megatron_lossagg.terms import LossTerm, TermFn


class LossAggregator:
    """Aggregates token losses exactly, whatever the layout, inside a Megatron schedule.

    J = sum over the global batch of w * l, with the weights of `modes.py`. Two ways to use it: plan
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
        model_config: the model's `TransformerConfig`; `calculate_per_token_loss` selects the
            regime.
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
        model_config: Any,
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
        self._settings = Settings(
            objective=make_objective(
                loss_fn,
                terms,
                loss_agg_mode=loss_agg_mode,
                loss_scale_factor=loss_scale_factor,
                norm_semantics=norm_semantics,
                sequence_count=sequence_count,
                metrics=metrics,
                compile=compile,
            ),
            model_config=model_config,
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
        self._iteration: Callable[[], int] | None = None
        self._stream = WrappedStream()
        self._finalizer = Finalizer(self._settings, self._stream)

    @classmethod
    def from_config(
        cls,
        loss_fn: LossFn | Mapping[str, TermFn],
        loss_agg_config: LossAggConfig,
        model_config: Any,
        *,
        groups: ParallelGroups | None = None,
        prepare: LossFn | None = None,
        metrics: Mapping[str, str] | None = None,
    ) -> LossAggregator:
        """Build one from a `LossAggConfig` (a YAML file, say) and the model's config.

        Args:
            loss_fn: of the constructor; with terms a mapping from the name of each to its function.
            loss_agg_config: the options.
            model_config: the model's `TransformerConfig`.
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
            return Step(context, None, resolve_num_microbatches(num_microbatches), given)
        check_microbatches(microbatches, num_microbatches)
        options = self._settings.weight_options(context.contract)
        plan = WeightPlan(microbatches, options, context.groups, given, num_units)
        return Step(context, plan, len(microbatches))

    def wrap(
        self,
        data_iterator: Any,
        *,
        num_microbatches: int | Callable[[], int],
        num_units: int | Callable[[], int] | None = None,
        iteration: Callable[[], int] | None = None,
    ) -> Iterator[dict[str, Any]] | list[Any] | None:
        """Wrap a trainer's iterator: one all-reduce over dp at the first `next` of a step.

        It takes the step's M microbatches at once, counts them and yields shallow copies with their
        weights. From the first step on, `model_config.finalize_model_grads_func` also runs the
        checks of `Step.validate` once per step, so that they happen before the optimizer steps.
        With deferred denominators nothing is counted ahead; the hook is set by this call, which
        every rank then makes, after `finalize_model_grads_func` was set.

        Args:
            data_iterator: an iterator of microbatches, a list of them (one per model chunk; they
                yield the same sequence, or are one object), or None on a rank without data.
            num_microbatches: what the schedule is called with, or a function that gives it.
            num_units: as in `begin_step`, or a function that gives it.
            iteration: a function that gives the step's number, where a coefficient is a schedule.

        Returns:
            The wrapped iterator; None for None; a list for a list.
        """
        self._measure_once()
        if not callable(num_microbatches):
            resolve_num_microbatches(num_microbatches)

        if iteration is not None:
            self._iteration = iteration
        if self._settings.is_deferred:
            self.install_finalize_hook()
            return self._stream.wrap(
                data_iterator, num_microbatches, self._plan_deferred_step, one_by_one=True
            )

        def plan_step(
            microbatches: Sequence[Microbatch] | None, num_microbatches: int
        ) -> tuple[Step, WeightPlan]:
            assert microbatches is not None
            return self._plan_wrapped_step(
                microbatches, num_units() if callable(num_units) else num_units
            )

        return self._stream.wrap(data_iterator, num_microbatches, plan_step)

    def loss_func(
        self, microbatch: Mapping[str, Any], output_tensor: Any, non_loss_data: bool = False
    ) -> Any:
        """`Step.loss_func` of the step that a wrapped iterator is in. No collective, no host sync.

        Raises:
            LossAggError: nothing was planned: `wrap` was not called on this rank.
        """
        step = self._stream.step_for_loss(lambda m: Step(self._step_context(), None, m))
        self.install_finalize_hook()
        return step.loss_func(microbatch, output_tensor, non_loss_data)

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
            # This rank receives numbers only: no coefficient is used.
            step = Step(self._settings.step_context(iteration=0), None, 1)
        return step.report(forward_data_store, broadcast_over_pipeline=broadcast_over_pipeline)

    def install_finalize_hook(self, model_config: Any = None) -> None:
        """Let `finalize_model_grads_func` of the config run this aggregator's checks.

        `wrap` and `loss_func` do it by themselves. Call it for a config that is a copy of the
        aggregator's: a schedule reads the hook from the config of its first model chunk.
        """
        self._finalizer.install(self.model_config if model_config is None else model_config)

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
        """The model's `TransformerConfig`."""
        return self._settings.model_config

    @property
    def weights_key(self) -> str:
        """The field of a microbatch that carries the weights."""
        return self._settings.weights_key

    @property
    def weights_keys(self) -> tuple[str, ...]:
        """The fields that carry weights: `weights_key`, and one more per further mode or mask.

        A loop that broadcasts its microbatches over tensor-parallel ranks sends all of them.
        """
        return self._settings.objective.weights_keys(self.weights_key)

    @property
    def must_measure(self) -> bool:
        """Whether contract="measure" was asked for and has not been done yet."""
        return self._must_measure

    def _measure_once(self) -> None:
        if self._must_measure:
            self.measure()

    def _plan_wrapped_step(
        self, microbatches: Sequence[Microbatch], num_units: int | None
    ) -> tuple[Step, WeightPlan]:
        context = self._step_context()
        self.install_finalize_hook()
        options = self._settings.weight_options(context.contract)
        plan = WeightPlan(microbatches, options, context.groups, num_units=num_units)
        return Step(context, plan, len(plan)), plan

    def _step_context(self) -> StepContext:
        """Of a wrapped step."""
        return self._settings.step_context(self._iteration() if self._iteration else None)

    def _plan_deferred_step(
        self, microbatches: Sequence[Microbatch] | None, num_microbatches: int
    ) -> tuple[Step, DeferredPlan]:
        context = self._step_context()
        plan = DeferredPlan(self._settings.weight_options(context.contract), num_microbatches)
        return Step(context, plan, num_microbatches), plan
