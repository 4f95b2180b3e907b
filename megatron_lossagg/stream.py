"""Steps of a loop that a trainer owns: they begin at the first `next`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from numbers import Integral
from typing import Any

from torch import Tensor

from megatron_lossagg.deferred import DeferredPlan
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.plan import Microbatch, WeightPlan
from megatron_lossagg.step import Step

NumMicrobatches = int | Callable[[], int]
# From a step's microbatches, or None where they are not known yet, and their number.
PlanStep = Callable[
    [Sequence[Microbatch] | None, int], tuple[Step, WeightPlan] | tuple[Step, DeferredPlan]
]


class WrappedStream:
    """The wrapped iterators of one aggregator on this rank, and the step they are in."""

    def __init__(self) -> None:
        self._active: Step | None = None
        self._has_data = False
        self._without_data: list[NumMicrobatches] = []

    def wrap(
        self,
        data_iterator: Any,
        num_microbatches: NumMicrobatches,
        plan: PlanStep,
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
        siblings = _Siblings(self, num_microbatches, plan, one_by_one)
        wrapped = [None if it is None else siblings.add(it) for it in iterators]
        if any(it is not None for it in wrapped):
            self._has_data = True
        elif num_microbatches not in self._without_data:
            self._without_data.append(num_microbatches)
        return wrapped if isinstance(data_iterator, list | tuple) else wrapped[0]

    @property
    def active(self) -> Step | None:
        """The step that this rank is in, if one began."""
        return self._active

    def activate(self, step: Step) -> None:
        """Make `step` the one that calls of `loss_func` belong to."""
        self._active = step

    def step_for_loss(self, step_without_data: Callable[[int], Step]) -> Step:
        """The step that a call of `loss_func` belongs to; raises LossAggError if there is none."""
        if not self._has_data and self._without_data:
            return self._step_without_data(step_without_data)
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

    def _step_without_data(self, make_step: Callable[[int], Step]) -> Step:
        """A step of a rank that gets its weights by broadcast; a new one after M calls."""
        numbers = {resolve_num_microbatches(source) for source in self._without_data}
        if len(numbers) > 1:
            raise LossAggError(
                f"This rank has no data and wrapped streams of {sorted(numbers)} microbatches, so "
                "it cannot tell which one runs. Use one LossAggregator per stream (training, "
                "evaluation), and a function as num_microbatches where it changes."
            )
        num_microbatches = numbers.pop()
        if (
            self._active is None
            or self._active.num_microbatches != num_microbatches
            or self._active.num_loss_calls >= num_microbatches
        ):
            self._active = make_step(num_microbatches)
        return self._active


class _Siblings:
    """The iterators of one stream's model chunks: one plan per step serves them all."""

    def __init__(
        self,
        stream: WrappedStream,
        num_microbatches: NumMicrobatches,
        plan: PlanStep,
        one_by_one: bool,
    ) -> None:
        self.stream = stream
        self.num_microbatches = num_microbatches
        self.one_by_one = one_by_one
        self._plan = plan
        self._sources: dict[int, _Source] = {}
        self._steps: dict[int, tuple[Step, WeightPlan | DeferredPlan]] = {}

    def add(self, data_iterator: Any) -> _WrappedIterator:
        """One more chunk's iterator; two chunks may share one object."""
        if not hasattr(data_iterator, "__next__"):
            raise TypeError(
                f"wrap expects an iterator of microbatches, got {type(data_iterator).__name__}. "
                "Pass iter(loader), a list of iterators (one per model chunk) or None."
            )
        source = self._sources.setdefault(id(data_iterator), _Source(data_iterator))
        return _WrappedIterator(self, source)

    def step(
        self, index: int, microbatches: list[Microbatch], num_microbatches: int
    ) -> tuple[Step, WeightPlan | DeferredPlan]:
        """Plan step `index` for the first chunk that gets there; the others share it."""
        if index not in self._steps:
            known = None if self.one_by_one else microbatches
            self._steps[index] = self._plan(known, num_microbatches)
            self._steps.pop(index - 2, None)
        step, plan = self._steps[index]
        if len(plan) != num_microbatches:
            raise LossAggError(
                f"The model chunks of this rank take {len(plan)} and {num_microbatches} "
                "microbatches in one step; their iterators must yield the same sequence."
            )
        return step, plan


class _Source:
    """A raw iterator from which a step's microbatches are taken once, for all chunks sharing it."""

    def __init__(self, data_iterator: Iterator[Microbatch]) -> None:
        self._data_iterator = data_iterator
        self._index = -1
        self._taken: list[Microbatch] = []

    def take(self, index: int, wanted: int, num_microbatches: int) -> list[Microbatch]:
        """The first `wanted` or more of the microbatches of step `index`; [] at the data's end."""
        if index != self._index:
            self._taken, self._index = [], index
        missing = max(0, wanted - len(self._taken))
        self._taken += islice(_iterate(self._data_iterator), missing)
        if 0 < len(self._taken) < wanted:
            raise LossAggError(
                f"The data iterator ended after {len(self._taken)} of {num_microbatches} "
                "microbatches of a step. Drop the last incomplete step, or let num_microbatches "
                "tell what is left; the other ranks must run the same steps."
            )
        return self._taken


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
        self._num_microbatches = 0
        self._microbatches: list[Microbatch] = []
        self._position = 0

    def __iter__(self) -> _WrappedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._position == self._num_microbatches:
            self._begin_step()
        index = self._position
        if index == len(self._microbatches):
            self._take(self._step_index, index + 1, self._num_microbatches)
        self._position += 1
        self._siblings.stream.activate(self._step)
        self._taken.value += 1
        return self._plan.with_weights(self._microbatches[index], index)

    def _take(self, index: int, wanted: int, num_microbatches: int) -> list[Microbatch]:
        wanted = wanted if self._siblings.one_by_one else num_microbatches
        return self._source.take(index, wanted, num_microbatches)

    def _begin_step(self) -> None:
        index = self._step_index + 1
        num_microbatches = resolve_num_microbatches(self._siblings.num_microbatches)
        microbatches = self._take(index, 1, num_microbatches)
        if not microbatches:
            raise StopIteration
        self._step, self._plan = self._siblings.step(index, microbatches, num_microbatches)
        self._taken = self._step.add_iterator()
        self._num_microbatches = num_microbatches
        self._microbatches = microbatches  # the source's list, which grows one by one
        self._position = 0
        self._step_index = index


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
