"""The one exception class for "this cannot be computed in the current parallel setup"."""

from __future__ import annotations


class LossAggError(RuntimeError):
    """Raised when a step, a schedule or a parallel layout cannot be honoured.

    Bad arguments raise `ValueError` or `TypeError`; this class is for what only shows at run time:
    a schedule that took another number of microbatches than was planned, a step that was never
    planned, a checksum that is off. The message says what was found, what was expected and what to
    do.
    """
