"""What runs around `finalize_model_grads_func`: the last place before the optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_lossagg.schedule.refusals import uses_full_iteration_cuda_graph
from megatron_lossagg.schedule.run import ScheduleRun, are_one_run


class Participant(Protocol):
    """Whose step it is when the schedule finalizes gradients."""

    def before_finalize(self, chunks: list[Any]) -> None:
        """The gradients are complete on this rank, and not reduced yet."""

    @property
    def deferred_factor(self) -> Callable[[], float] | None:
        """What counts a deferred step and gives the factor of its gradients, if one runs."""

    def after_finalize(self, chunks: list[Any], num_tokens: Tensor | None) -> None:
        """The gradients are what the optimizer will see.

        `num_tokens` is what the schedule summed up on this rank; None outside R3.
        """


class Division(Protocol):
    """Divides gradients where denominators are deferred."""

    def __call__(self, chunks: list[Any], factor_here: Callable[[], float] | None) -> None:
        """Communicates over pp: multiply the gradients of `chunks`.

        `factor_here` is the `deferred_factor` of the step that ran here, if one did.
        """


@dataclass(frozen=True)
class _Entry:
    participant: weakref.ref[Participant]
    run: ScheduleRun | None


class FinalizeHook:
    """A `finalize_model_grads_func` that calls the participants of this run around the original.

    A step enters when it begins or computes a loss. It leaves when gradients were finalized, when
    another step enters in a later run of the schedule, or with its aggregator: nothing of a step
    that ended or failed meets the gradients of a later one.

    Args:
        finalize: the function that is wrapped.

    Attributes:
        finalize: that function.
        division: what divides gradients where denominators are deferred; stays with the config.
    """

    def __init__(self, finalize: Callable[..., Any]) -> None:
        self.finalize = finalize
        self.division: Division | None = None
        self._entries: list[_Entry] = []

    @property
    def participants(self) -> list[Participant]:
        """Whose steps have begun and were not finalized yet."""
        found = [entry.participant() for entry in self._entries]
        return [participant for participant in found if participant is not None]

    def enter(self, participant: Participant, *, begins: bool) -> None:
        """A step of this participant runs; `begins` where it is a new one."""
        if not begins and participant in self.participants:
            return
        run = ScheduleRun.current()
        self.leave(participant)
        self._entries = [entry for entry in self._entries if are_one_run(entry.run, run)]
        self._entries.append(_Entry(weakref.ref(participant), run))

    def leave(self, participant: Participant) -> None:
        """This participant's step failed, or begins anew."""
        self._entries = [e for e in self._entries if e.participant() not in (participant, None)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's finalize_model_grads(model, num_tokens=None, ...)."""
        chunks = args[0] if args else kwargs.get("model", [])
        num_tokens = args[1] if len(args) > 1 else kwargs.get("num_tokens")
        # finalize sums it over ranks in place
        num_tokens = num_tokens.clone() if isinstance(num_tokens, Tensor) else None
        participants, self._entries = self.participants, []
        for participant in participants:
            participant.before_finalize(chunks)
        result = self.finalize(*args, **kwargs)
        if self.division is not None:
            factors = [p.deferred_factor for p in participants if p.deferred_factor is not None]
            self.division(chunks, factors[-1] if factors else None)
        for participant in participants:
            participant.after_finalize(chunks, num_tokens)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> FinalizeHook:
        # Megatron deep-copies configs for some layers; process groups cannot be copied.
        return self

    def __reduce__(self) -> Any:
        # Participants belong to this process: a pickled config holds the function that was wrapped.
        return _same, (self.finalize,)


def _same(finalize: Callable[..., Any]) -> Callable[..., Any]:
    return finalize


def hook_of(model_config: Any) -> FinalizeHook | None:
    """The hook in `model_config.finalize_model_grads_func`, put there if it is missing.

    None where that function is not set, and with full-iteration CUDA graphs: finalize would be
    captured with the step, and participants read values.
    """
    hook = getattr(model_config, "finalize_model_grads_func", None)
    if hook is None or uses_full_iteration_cuda_graph(model_config):
        return None
    if not isinstance(hook, FinalizeHook):
        hook = model_config.finalize_model_grads_func = FinalizeHook(hook)
    return hook
