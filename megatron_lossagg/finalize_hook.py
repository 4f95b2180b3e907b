"""What runs around `finalize_model_grads_func`: the last place before the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from megatron_lossagg.refusals import uses_full_iteration_cuda_graph


class Participant(Protocol):
    """Who is called when the schedule finalizes gradients."""

    def before_finalize(self, chunks: list[Any]) -> None:
        """The gradients are complete on this rank, and not reduced yet."""

    def after_finalize(self, chunks: list[Any], num_tokens: Tensor | None) -> None:
        """The gradients are what the optimizer will see.

        `num_tokens` is what the schedule summed up on this rank; None outside R3.
        """


class FinalizeHook:
    """A `finalize_model_grads_func` that calls its participants around the original."""

    def __init__(self, finalize: Callable[..., Any]) -> None:
        self.finalize = finalize
        self.participants: list[Participant] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's finalize_model_grads(model, num_tokens=None, ...)."""
        chunks = args[0] if args else kwargs.get("model", [])
        num_tokens = args[1] if len(args) > 1 else kwargs.get("num_tokens")
        # finalize sums it over ranks in place
        num_tokens = num_tokens.clone() if isinstance(num_tokens, Tensor) else None
        for participant in self.participants:
            participant.before_finalize(chunks)
        result = self.finalize(*args, **kwargs)
        for participant in self.participants:
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


def install_finalize_hook(model_config: Any, participant: Participant) -> None:
    """Call `participant` whenever the schedule finalizes gradients, once however often this runs.

    With full-iteration CUDA graphs nothing is installed: finalize would be captured with the step,
    and participants read values. Nor is it where `finalize_model_grads_func` is not set.
    """
    if uses_full_iteration_cuda_graph(model_config):
        return
    hook = getattr(model_config, "finalize_model_grads_func", None)
    if hook is None:
        return
    if not isinstance(hook, FinalizeHook):
        hook = model_config.finalize_model_grads_func = FinalizeHook(hook)
    if participant not in hook.participants:
        hook.participants.append(participant)
