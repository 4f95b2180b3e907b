"""The wrapped iterators of a stream: each hands out a step's microbatches with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.run import ScheduleRun, has_been_left
from megatron_lossagg.step.step import Step
from megatron_lossagg.step.stream_options import PlanStep, StreamOptions
from megatron_lossagg.weights.microbatch import Microbatch, resolve_num_microbatches


class ActiveStep(Protocol):
    """Who is told which step runs."""

    def activate(self, step: Step) -> None:
        """Calls of `loss_func` belong to this step from now on."""

    def sees_runs_end(self) -> bool:
        """Whether a run of the schedule ends with a call of ours."""


class ChunkIterators:
    """The iterators of one stream's model chunks: one plan per step serves them all."""

    def __init__(
        self,
        stream: ActiveStep,
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

    def add(self, data_iterator: Any) -> WrappedIterator:
        """One more chunk's iterator; two chunks may share one object."""
        if not hasattr(data_iterator, "__next__"):
            raise TypeError(
                f"wrap expects an iterator of microbatches, got {type(data_iterator).__name__}. "
                "Pass iter(loader), a list of iterators (one per model chunk) or None."
            )
        source = self._sources.setdefault(id(data_iterator), _Source(data_iterator))
        return WrappedIterator(self, source)

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


class WrappedIterator:
    """Yields a stream's microbatches with their weights, planning a step at its first one."""

    def __init__(self, chunks: ChunkIterators, source: _Source) -> None:
        self._chunks = chunks
        self._source = source
        self._step_index = -1
        self._num_restarts = 0
        self._num_microbatches = 0
        self._microbatches: list[Microbatch] = []
        self._position = 0
        self._run: ScheduleRun | None = None
        self.is_last_chunk = False

    def __iter__(self) -> WrappedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        self._leave_interrupted_step()
        if self._position == self._num_microbatches:
            self._begin_step()
        index = self._position
        if index == len(self._microbatches):
            self._take(self._step_index, index + 1, self._num_microbatches)
        self._position += 1
        self._chunks.stream.activate(self._step)
        self._taken.value += 1
        return self._step.with_weights(self._microbatches[index], index)

    def _leave_interrupted_step(self) -> None:
        """Go on with a whole step if an exception ended the schedule in the middle of one."""
        is_inside = 0 < self._position < self._num_microbatches
        if is_inside and self._is_left(run := ScheduleRun.current()):
            self._step_index = self._chunks.leave_run(run)
        elif self._num_restarts != self._chunks.num_restarts:
            self._step_index = self._chunks.index_at_restart
        else:
            return
        self._num_restarts = self._chunks.num_restarts
        self._position = self._num_microbatches

    def _is_left(self, run: ScheduleRun | None) -> bool:
        """Whether an exception has ended the run in which this chunk began its step.

        Where gradients are finalized by the schedule, a run that ends otherwise is seen to end.
        Elsewhere several runs of the schedule may make one step, unless a loss is missing.
        """
        if not has_been_left(self._run, run):
            return False
        lacks_loss = self._step.context.computes_loss and self._step.num_loss_calls < self._position
        return self._chunks.stream.sees_runs_end() or (self.is_last_chunk and lacks_loss)

    def _take(self, index: int, wanted: int, num_microbatches: int) -> list[Microbatch]:
        wanted = wanted if self._chunks.one_by_one else num_microbatches
        return self._source.take(index, wanted, num_microbatches)

    def _begin_step(self) -> None:
        run = ScheduleRun.current()
        if self._chunks.was_left(self._step_index + 1, run):
            self._step_index = self._chunks.leave_run(run)
            self._num_restarts = self._chunks.num_restarts
        index = self._step_index + 1
        num_microbatches = resolve_num_microbatches(self._chunks.options.num_microbatches)
        self._chunks.begin(index, self._source)
        microbatches = self._take(index, 1, num_microbatches)
        if not microbatches:
            raise StopIteration
        self._step = self._chunks.step(index, microbatches, num_microbatches)
        self._taken = self._step.add_iterator()
        self._num_microbatches = num_microbatches
        self._microbatches = microbatches  # the source's list, which grows one by one
        self._position = 0
        self._step_index = index
        self._run = run
