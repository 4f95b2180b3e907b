"""Steps of a loop that a trainer owns: they begin at the first `next`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.run import ScheduleRun, has_been_left
from megatron_lossagg.step.step import Step
from megatron_lossagg.weights.microbatch import Microbatch

NumMicrobatches = int | Callable[[], int]


@dataclass(frozen=True)
class StreamOptions:
    """The arguments of one call of `LossAggregator.wrap`; see there."""

    num_microbatches: NumMicrobatches
    num_units: int | Callable[[], int] | None = None
    iteration: Callable[[], int] | None = None
    forward_only: bool = False
    pairs_by_tokens: bool | None = None


# Plans a step of a stream from its microbatches, or from none where they are not known yet, and M.
PlanStep = Callable[[StreamOptions, Sequence[Microbatch] | None, int], Step]


class WrappedStream:
    """The wrapped iterators of one aggregator on this rank, and the step they are in."""

    def __init__(self) -> None:
        self._has_hook: weakref.WeakMethod[Callable[[], bool]] | None = None
        self._active: Step | None = None
        self._has_data = False
        self._without_data: list[StreamOptions] = []
        self._active_without_data: StreamOptions | None = None
        self._run_without_data: ScheduleRun | None = None
        self._siblings: weakref.WeakSet[_Siblings] = weakref.WeakSet()

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
        """
        iterators = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]
        if not iterators:
            raise ValueError(
                "wrap got an empty list; expected one iterator (or None) per model chunk."
            )
        siblings = _Siblings(self, options, plan_step, one_by_one)
        wrapped = [None if it is None else siblings.add(it) for it in iterators]
        if any(it is not None for it in wrapped):
            self._has_data = True
            self._siblings.add(siblings)
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
        for siblings in self._siblings:
            siblings.restart()

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


class _Siblings:
    """The iterators of one stream's model chunks: one plan per step serves them all."""

    def __init__(
        self,
        stream: WrappedStream,
        options: StreamOptions,
        plan_step: PlanStep,
        one_by_one: bool,
    ) -> None:
        self.stream = stream
        self.options = options
        self.one_by_one = one_by_one
        self.num_restarts = 0
        self._index_at_restart = -1
        self._last_index = -1
        self._runs: dict[int, ScheduleRun | None] = {}
        self._plan_step = plan_step
        self._sources: dict[int, _Source] = {}
        self._steps: dict[int, Step] = {}
        self._starts: dict[int, int] = {}

    def add(self, data_iterator: Any) -> _WrappedIterator:
        """One more chunk's iterator; two chunks may share one object."""
        if not hasattr(data_iterator, "__next__"):
            raise TypeError(
                f"wrap expects an iterator of microbatches, got {type(data_iterator).__name__}. "
                "Pass iter(loader), a list of iterators (one per model chunk) or None."
            )
        source = self._sources.setdefault(id(data_iterator), _Source(data_iterator))
        return _WrappedIterator(self, source)

    def begin(self, index: int, source: _Source) -> None:
        """Put `source` to where step `index` starts: behind what any chunk took of earlier ones."""
        if index not in self._starts:
            self._starts[index] = max(source.num_taken for source in self._sources.values())
            self._starts.pop(index - 2, None)
        source.skip_to(self._starts[index])

    def step(self, index: int, microbatches: list[Microbatch], num_microbatches: int) -> Step:
        """Plan step `index` for the first chunk that gets there; the others share it."""
        if index not in self._steps:
            known = None if self.one_by_one else microbatches
            self._steps[index] = self._plan_step(self.options, known, num_microbatches)
            self._steps.pop(index - 2, None)
            self._last_index = index
            self._runs[index] = ScheduleRun.current()
            self._runs.pop(index - 2, None)
        step = self._steps[index]
        if step.num_microbatches != num_microbatches:
            raise LossAggError(
                f"The model chunks of this rank take {step.num_microbatches} and "
                f"{num_microbatches} microbatches in one step; their iterators must yield the same "
                "sequence."
            )
        return step

    def restart(self) -> None:
        """All chunks go on with the step after the latest one."""
        self.num_restarts += 1
        self._index_at_restart = self._last_index

    def was_left(self, index: int, run: ScheduleRun | None) -> bool:
        """Whether another chunk has begun step `index` in a run that an exception ended."""
        return self.stream.sees_runs_end() and has_been_left(self._runs.get(index), run)

    @property
    def index_at_restart(self) -> int:
        """The latest step when the chunks were restarted."""
        return self._index_at_restart

    def leave_run(self, run: ScheduleRun | None) -> int:
        """A chunk is in the middle of a step that an exception ended: the step before its next one.

        That is the step which another chunk has begun in this run already, or a new one for all.
        """
        last_run = self._runs.get(self._last_index)
        if last_run is not None and not has_been_left(last_run, run):
            return self._last_index - 1
        self.restart()
        return self._index_at_restart


class _Source:
    """A raw iterator from which a step's microbatches are taken once, for all chunks sharing it."""

    def __init__(self, data_iterator: Iterator[Microbatch]) -> None:
        self._data_iterator = data_iterator
        self._index = -1
        self._taken: list[Microbatch] = []
        self.num_taken = 0

    def take(self, index: int, wanted: int, num_microbatches: int) -> list[Microbatch]:
        """The first `wanted` or more of the microbatches of step `index`; [] at the data's end."""
        if index != self._index:
            self._taken, self._index = [], index
        missing = list(islice(_iterate(self._data_iterator), max(0, wanted - len(self._taken))))
        self._taken += missing
        self.num_taken += len(missing)
        if 0 < len(self._taken) < wanted:
            raise LossAggError(
                f"The data iterator ended after {len(self._taken)} of {num_microbatches} "
                "microbatches of a step. Drop the last incomplete step, or let num_microbatches "
                "tell what is left; the other ranks must run the same steps."
            )
        return self._taken

    def skip_to(self, num_taken: int) -> None:
        """Drop what another chunk took of a step that is not to be run."""
        missing = max(0, num_taken - self.num_taken)
        skipped = list(islice(_iterate(self._data_iterator), missing))
        self.num_taken += len(skipped)


def _iterate(data_iterator: Any) -> Iterator[Any]:
    """Iterate over what has `__next__` alone, as Megatron's `RerunDataIterator`."""
    while True:
        try:
            microbatch = next(data_iterator)
        except StopIteration:
            return
        yield microbatch


class _WrappedIterator:
    """Yields a stream's microbatches with their weights, planning a step at its first one."""

    def __init__(self, siblings: _Siblings, source: _Source) -> None:
        self._siblings = siblings
        self._source = source
        self._step_index = -1
        self._num_restarts = 0
        self._num_microbatches = 0
        self._microbatches: list[Microbatch] = []
        self._position = 0
        self._run: ScheduleRun | None = None
        self.is_last_chunk = False

    def __iter__(self) -> _WrappedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        self._leave_interrupted_step()
        if self._position == self._num_microbatches:
            self._begin_step()
        index = self._position
        if index == len(self._microbatches):
            self._take(self._step_index, index + 1, self._num_microbatches)
        self._position += 1
        self._siblings.stream.activate(self._step)
        self._taken.value += 1
        return self._step.with_weights(self._microbatches[index], index)

    def _leave_interrupted_step(self) -> None:
        """Go on with a whole step if an exception ended the schedule in the middle of one."""
        is_inside = 0 < self._position < self._num_microbatches
        if is_inside and self._is_left(run := ScheduleRun.current()):
            self._step_index = self._siblings.leave_run(run)
        elif self._num_restarts != self._siblings.num_restarts:
            self._step_index = self._siblings.index_at_restart
        else:
            return
        self._num_restarts = self._siblings.num_restarts
        self._position = self._num_microbatches

    def _is_left(self, run: ScheduleRun | None) -> bool:
        """Whether an exception has ended the run in which this chunk began its step.

        Where gradients are finalized by the schedule, a run that ends otherwise is seen to end.
        Elsewhere several runs of the schedule may make one step, unless a loss is missing.
        """
        if not has_been_left(self._run, run):
            return False
        lacks_loss = self._step.computes_loss and self._step.num_loss_calls < self._position
        return self._siblings.stream.sees_runs_end() or (self.is_last_chunk and lacks_loss)

    def _take(self, index: int, wanted: int, num_microbatches: int) -> list[Microbatch]:
        wanted = wanted if self._siblings.one_by_one else num_microbatches
        return self._source.take(index, wanted, num_microbatches)

    def _begin_step(self) -> None:
        run = ScheduleRun.current()
        if self._siblings.was_left(self._step_index + 1, run):
            self._step_index = self._siblings.leave_run(run)
            self._num_restarts = self._siblings.num_restarts
        index = self._step_index + 1
        num_microbatches = resolve_num_microbatches(self._siblings.options.num_microbatches)
        self._siblings.begin(index, self._source)
        microbatches = self._take(index, 1, num_microbatches)
        if not microbatches:
            raise StopIteration
        self._step = self._siblings.step(index, microbatches, num_microbatches)
        self._taken = self._step.add_iterator()
        self._num_microbatches = num_microbatches
        self._microbatches = microbatches  # the source's list, which grows one by one
        self._position = 0
        self._step_index = index
        self._run = run


def resolve_num_microbatches(num_microbatches: NumMicrobatches) -> int:
    """M from a number or a function that gives it; raises unless it is an int of at least 1."""
    value: Any = num_microbatches() if callable(num_microbatches) else num_microbatches
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"num_microbatches must be an int (or a function giving one), got {value!r}."
        )
    if value < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {value}.")
    return int(value)
