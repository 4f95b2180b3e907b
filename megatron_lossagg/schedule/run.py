"""Which run of Megatron's schedule the caller is in."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

_MODULE = "megatron.core.pipeline_parallel.schedules"
# A tensor that every run of a schedule makes, and keeps until it ends.
_LOCAL = "total_num_tokens"


class ScheduleRun:
    """A run of the schedule, told apart from earlier and later ones; it keeps nothing alive."""

    def __init__(self, token: Any) -> None:
        self._token = weakref.ref(token)

    @classmethod
    def current(cls) -> ScheduleRun | None:
        """The run that has called, however deep; None outside of Megatron's own schedules.

        A schedule that an exception ended and the one that is run again look alike to a data
        iterator, which is asked for its next microbatch by both: only the call stack tells.
        """
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if frame.f_globals.get("__name__") == _MODULE and (
                _LOCAL in code.co_varnames or _LOCAL in code.co_cellvars
            ):
                token = _local_of(frame)
                if token is not None:
                    return cls(token)
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def is_same_as(self, other: ScheduleRun) -> bool:
        """Whether both are one run that has not ended."""
        token = self._token()
        return token is not None and token is other._token()


def _local_of(frame: FrameType) -> Any:
    snapshot = frame.f_locals
    token = snapshot.get(_LOCAL)
    if type(snapshot) is dict:  # up to Python 3.12, kept by the frame: it would keep activations
        snapshot.clear()
    return token


def has_been_left(begun_in: ScheduleRun | None, now: ScheduleRun | None) -> bool:
    """Whether what began in one run is met in another: an exception has ended the first."""
    return begun_in is not None and now is not None and not begun_in.is_same_as(now)


def are_one_run(one: ScheduleRun | None, other: ScheduleRun | None) -> bool:
    """Whether both are one run, or neither is of Megatron's own schedules."""
    if one is None or other is None:
        return one is other
    return one.is_same_as(other)
