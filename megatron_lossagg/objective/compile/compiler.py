"""How methods are compiled: the backend of `torch.compile`, and graphs of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

BACKEND: Any = "inductor"


def compile_method(method: Any, backend: Any = None) -> Callable[..., Any]:
    """A bound method through `torch.compile`, for any shapes, as one graph or not at all.

    torch counts graphs per code object and stops at 8, so every call of this makes one of its own.
    """
    function = method.__func__
    code, name = function.__code__.replace(), function.__name__
    copied = FunctionType(code, function.__globals__, name, function.__defaults__)
    return torch.compile(
        MethodType(copied, method.__self__),
        dynamic=True,
        fullgraph=True,
        backend=backend or BACKEND,
    )


def backend_of_constants(graph: Any, inputs: Sequence[Any]) -> Any:
    """The backend, for graphs of which no input needs a gradient.

    torch guards on this, too: should an input come to need one later, it compiles anew.

    Args:
        graph: what torch traced.
        inputs: examples of what it takes.

    Returns:
        What runs instead of it.

    Raises:
        TypeError: an input needs a gradient.
    """
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        raise TypeError("loss_fn uses a tensor that needs a gradient and is not the output.")
    return torch._dynamo.lookup_backend(BACKEND)(graph, list(inputs))
