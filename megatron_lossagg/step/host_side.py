"""`HostSide`: what the adapter of a framework needs of an aggregator beyond its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import (
    broadcast_from_first,
    broadcast_from_last,
    communication_device,
)
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.schedule.measure import Measurement
from megatron_lossagg.step.finalizer import Finalizer
from megatron_lossagg.step.planner import StepPlanner
from megatron_lossagg.step.settings import Settings
from megatron_lossagg.step.step import Step
from megatron_lossagg.step.stream import WrappedStream
from megatron_lossagg.weights.metrics import share_divisors
from megatron_lossagg.weights.microbatch import METRIC_DIVISORS


class HostSide:
    """Base of `LossAggregator`: the model's config, the finalize hook, what ranks tell each other.

    Args:
        settings: what the aggregator was built with.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._must_measure = settings.options.contract == "measure"
        self._planner = StepPlanner(settings)
        self._stream = WrappedStream()
        self._finalizer = Finalizer(settings, self._stream)
        self._stream.watch_runs(self._finalizer.has_hook)
        self._planned: Step | None = None
        self._received: Step | None = None
        if settings.config_source.is_known:
            self._finalizer.watch(self.model_config)

    @property
    def settings(self) -> Settings:
        """What it was built with."""
        return self._settings

    @property
    def model_config(self) -> Any:
        """The model's `TransformerConfig`. Raises LossAggError while it is not known."""
        return self._settings.model_config

    @property
    def has_model_config(self) -> bool:
        """Whether the model's config is known already."""
        return self._settings.config_source.is_known

    def use_model_config(self, model_config: Any) -> None:
        """Take the model's config where none was given; it stays what it was where one was.

        Args:
            model_config: the model's `TransformerConfig`.

        Raises:
            TypeError: not a model's config.
        """
        self._settings.config_source.set_default(model_config)

    def install_finalize_hook(self, model_config: Any = None) -> None:
        """Let `finalize_model_grads_func` of the config run this aggregator's checks.

        Steps do it by themselves in the aggregator's `model_config`. Call it once for a config that
        is a copy of it, after `finalize_model_grads_func` was set there: a schedule reads that from
        the config of its first model chunk.
        """
        if model_config is None:
            model_config = self._settings.model_config
        self._finalizer.watch(model_config)
        self._finalizer.enter()

    @property
    def mode_spec(self) -> ModeSpec:
        """The mode of the main mask, and its options."""
        return self._settings.main_spec

    @property
    def can_evaluate(self) -> bool:
        """Whether a run without gradients gives J: not if these would be divided at the end."""
        return not self._settings.may_divide_later

    @property
    def denominators(self) -> str:
        """When counts are known: "counted" before a step, "deferred" at its end."""
        return self._settings.options.denominators

    @property
    def weights_key(self) -> str:
        """The field of a microbatch that carries the weights."""
        return self._settings.options.weights_key

    @property
    def weights_keys(self) -> tuple[str, ...]:
        """The fields that carry weights: `weights_key`, and one more per further mode or mask.

        A loop that broadcasts its microbatches over tensor-parallel ranks sends all of them. Where
        `weights_key` is "loss_mask" and no term uses that mask, this field keeps the mask itself.
        """
        objective = self._settings.objective
        return tuple(dict.fromkeys((self.weights_key, *objective.weights_keys(self.weights_key))))

    def abandon_step(self) -> None:
        """Forget the wrapped step that an exception interrupted. Does not communicate.

        Wrapped iterators then go on with a whole step, the one after it. It happens by itself when
        `loss_func` raises, and when Megatron's own schedules are run again after any exception; a
        loop of another kind that catches one and goes on calls it on every rank.
        """
        self._finalizer.leave()
        self._stream.abandon()

    def validate(self, num_tokens: Tensor | None = None) -> None:
        """`Step.validate` of a wrapped step: all-reduces over tp and dp x cp on the last stage.

        The first step installs it in `model_config.finalize_model_grads_func`, which gives it the
        `num_tokens` of the schedule; a loop without that hook calls it on every rank before the
        optimizer steps.
        """
        self._stream.validate(num_tokens)

    def _receiver(self) -> Step:
        """A step that this rank does not run, whose report it hears.

        Raises:
            LossAggError: the loss is computed here.
        """
        if self._settings.current_groups().is_last_stage:
            raise LossAggError(
                "report was called, but no wrapped step has run on this rank, where the loss "
                "is computed. Run the schedule first, or use begin_step and step.report."
            )
        self._received = self._planner.receiver()
        return self._received

    @property
    def is_empty(self) -> bool:
        """`Step.is_empty` of the wrapped step that ran last: skip the optimizer then.

        Waits for the device. On a rank without data it is known after `report`.

        Raises:
            LossAggError: no step has run on this rank.
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
        return {**microbatch, METRIC_DIVISORS: share_divisors(found, num_metrics, groups)}

    @property
    def must_measure(self) -> bool:
        """Whether contract="measure" was asked for and has not been done yet."""
        return self._must_measure

    def measure(self, **options: Any) -> Measurement:
        """Communicates over all groups: see `ScheduleContract.measure`. Every rank must call it."""
        measurement = ScheduleContract.measure(
            self.model_config,
            self._settings.current_groups(),
            returns=self._settings.options.returns,
            cp_gradient=self._settings.options.cp_gradient,
            **options,
        )
        self._must_measure = False
        self._finalizer.measured_wrappers += tuple(map(type, options.get("model") or ()))
        return measurement

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
