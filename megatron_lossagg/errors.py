"""The one exception class for "this cannot be computed in the current parallel setup"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LossAggError(RuntimeError):
    """Raised when a step, a schedule or a parallel layout cannot be honoured.

    Bad arguments raise `ValueError` or `TypeError`; this class is for what only shows at run time:
    a schedule that took another number of microbatches than was planned, a step that was never
    planned, a checksum that is off. The message says what was found, what was expected and what to
    do.
    """


def keys_or_type(value: Any) -> str:
    """What a message says about a value that should be a certain dict: its keys, or its type."""
    return ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
