"""Steps of a loop that a trainer owns: they begin at the first `next`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.run import ScheduleRun, has_been_left
from megatron_lossagg.step.iterators import ChunkIterators
from megatron_lossagg.step.step import Step
from megatron_lossagg.step.stream_options import PlanStep, StreamOptions
from megatron_lossagg.weights.microbatch import resolve_num_microbatches


class WrappedStream:
    """The wrapped iterators of one aggregator on this rank, and the step they are in."""

    def __init__(self) -> None:
        self._has_hook: weakref.WeakMethod[Callable[[], bool]] | None = None
        self._active: Step | None = None
        self._has_data = False
        self._without_data: list[StreamOptions] = []
        self._active_without_data: StreamOptions | None = None
        self._run_without_data: ScheduleRun | None = None
        self._chunk_iterators: weakref.WeakSet[ChunkIterators] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins anew: steps belong to iterators of the original."""
        return WrappedStream, ()

    def watch_runs(self, has_hook: Callable[[], bool]) -> None:
        """Let a method tell whether the schedule calls us when it finalizes gradients."""
        self._has_hook = weakref.WeakMethod(has_hook)

    def sees_runs_end(self) -> bool:
        """Whether a run of the schedule ends with a call of ours: while training, if hooked."""
        has_hook = None if self._has_hook is None else self._has_hook()
        return torch.is_grad_enabled() and has_hook is not None and has_hook()

    def wrap(
        self,
        data_iterator: Any,
        options: StreamOptions,
        plan_step: PlanStep,
        *,
        one_by_one: bool = False,
    ) -> Any:
        """Wrap one iterator, a list of chunk iterators (each may be None), or None.

        With `one_by_one` a microbatch is taken when it is asked for, not the whole step at once.

        Args:
            data_iterator: see `LossAggregator.wrap`.
            options: its other arguments.
            plan_step: plans a step of the stream.
            one_by_one: see above.

        Returns:
            What was passed, wrapped.

        Raises:
            ValueError: an empty list.
        """
        iterators = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]
        if not iterators:
            raise ValueError(
                "wrap got an empty list; expected one iterator (or None) per model chunk."
            )
        chunk_iterators = ChunkIterators(self, options, plan_step, one_by_one)
        wrapped = [None if it is None else chunk_iterators.add(it) for it in iterators]
        if any(it is not None for it in wrapped):
            self._has_data = True
            self._chunk_iterators.add(chunk_iterators)
            if wrapped[-1] is not None:
                wrapped[-1].is_last_chunk = True
        elif options not in self._without_data:
            self._without_data.append(options)
        return wrapped if isinstance(data_iterator, list | tuple) else wrapped[0]

    @property
    def has_data(self) -> bool:
        """Whether an iterator was wrapped on this rank."""
        return self._has_data

    @property
    def active(self) -> Step | None:
        """The step that this rank is in, if one began."""
        return self._active

    def activate(self, step: Step) -> None:
        """Make `step` the one that calls of `loss_func` belong to."""
        self._active = step

    def abandon(self) -> None:
        """Forget a step that an exception interrupted: iterators go on with a whole one."""
        self._active = None
        for chunk_iterators in self._chunk_iterators:
            chunk_iterators.restart()

    def step_for_loss(self, plan_step: PlanStep, *, reads_iteration: bool) -> Step:
        """The step that a call of `loss_func` belongs to; raises LossAggError if there is none."""
        if not self._has_data and self._without_data:
            return self._step_without_data(plan_step, reads_iteration)
        if self._active is None:
            raise LossAggError(
                "loss_func was called, but no step was planned on this rank. Give the schedule "
                "aggregator.wrap(data_iterator, num_microbatches=...) (wrap(None, ...) on a rank "
                "without data), or use begin_step and step.loss_func."
            )
        return self._active

    def validate(self, num_tokens: Tensor | None = None) -> None:
        """Check the pass that ended, if any."""
        if self._active is not None:
            self._active.validate(num_tokens)

    def leave(self) -> None:
        """A step that was planned otherwise runs: calls belong to no wrapped one."""
        self._active = None

    def _step_without_data(self, plan_step: PlanStep, reads_iteration: bool) -> Step:
        """A step of a rank that gets its weights by broadcast; a new one after M calls."""
        options = self._options_without_data(reads_iteration)
        num_microbatches = resolve_num_microbatches(options.num_microbatches)
        run = ScheduleRun.current()
        if (
            self._active is None
            or has_been_left(self._run_without_data, run)
            or self._active_without_data is not options
            or self._active.num_microbatches != num_microbatches
            or self._active.num_loss_calls >= num_microbatches
        ):
            self._active = plan_step(options, None, num_microbatches)
            self._active_without_data = options
            self._run_without_data = run
        return self._active

    def _options_without_data(self, reads_iteration: bool) -> StreamOptions:
        """Those of the stream that runs; raises LossAggError where that cannot be told."""
        evaluates = not torch.is_grad_enabled()
        suited = [o for o in self._without_data if o.forward_only == evaluates]
        suited = suited or [o for o in self._without_data if not o.forward_only]
        suited = suited or self._without_data
        numbers = {resolve_num_microbatches(o.num_microbatches) for o in suited}
        if len(numbers) > 1:
            raise LossAggError(
                f"This rank has no data and wrapped streams of {sorted(numbers)} microbatches, so "
                "it cannot tell which one runs. Use one LossAggregator per stream (training, "
                "evaluation), wrap an evaluated one with forward_only=True, and pass a function as "
                "num_microbatches where it changes."
            )
        iterations = {o.iteration() for o in suited if o.iteration} if reads_iteration else set()
        if len(iterations) > 1:
            raise LossAggError(
                f"This rank has no data and wrapped streams at iterations {sorted(iterations)}, so "
                "it cannot tell at which one a coefficient is meant. Wrap each stream once, with a "
                "function that gives its current iteration, and an evaluated one with "
                "forward_only=True; other streams need a LossAggregator of their own."
            )
        return suited[0]
