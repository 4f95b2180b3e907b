"""`CompiledFunction`: a function through `torch.compile`, or as it is where that cannot be done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class CompiledFunction:
    """Calls a function through `torch.compile`; the first failure returns to plain Python for good.

    One graph serves every number of rows and every width, except that torch makes another one for
    tensors of a single row, for small ones (up to 4096 elements), and without gradients. Nothing is
    compiled before the first call.

    Numbers agree to rounding. On the CPU torch compiles expm1(x) as exp(x) - 1, so in float32 k3 of
    a small log ratio x is off by up to 6e-8, and by 6e-8 |x| uncompiled.

    Args:
        function: what `torch.compile(..., fullgraph=True)` can trace: no host sync, no branch on
            data.
        name: what a warning calls it.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name
        self._compiled: Callable[..., Any] | None = torch.compile(
            function, dynamic=True, fullgraph=True
        )

    @property
    def is_compiled(self) -> bool:
        """Whether calls still go through the compiler."""
        return self._compiled is not None

    def __call__(self, *args: Any) -> Any:
        """The function's result; warns once if the compiler fails, not if the function does."""
        if self._compiled is None:
            return self._function(*args)
        try:
            return self._compiled(*args)
        except Exception as error:
            result = self._function(*args)  # a fault of the function itself is raised here
            self._compiled = None
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"{self._name} could not be compiled and runs uncompiled from here on, with the "
                f"same numbers. {type(error).__name__}: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
            return result
