"""A warning for an option that somebody wrote and that changes nothing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from megatron_lossagg.modes.options import ModeOptions
from megatron_lossagg.modes.spec import ModeSpec

# What the mode alone decides; whether anything reads `sequence_count` depends on metrics too.
BY_MODE = ("loss_scale_factor", "norm_semantics")
_WHO_READS_IT = {
    "loss_scale_factor": "Leave it out, or take a mode that divides by L: seq-mean-token-sum-norm.",
    "norm_semantics": "Leave it out, or take the mode that it is for: seq-mean-token-sum-norm.",
    "sequence_count": (
        "Nor does anything else here: a metric over 'sequences' or 'units', or report_counts. "
        "Leave it out."
    ),
}
_TOLD: set[tuple[str, str]] = set()
_IS_JUDGED = ContextVar("_IS_JUDGED", default=False)


def warn_of_unread(spec: ModeSpec, given: ModeOptions, options: tuple[str, ...] = BY_MODE) -> None:
    """Warn of each of `options` that was given and that the mode does not read.

    Once per process for an option and a mode. A value that is the default is no reason to warn.
    """
    if _IS_JUDGED.get():
        return
    for option, value in given.not_default.items():
        is_told = (option, spec.loss_agg_mode) in _TOLD
        if option not in options or option in spec.formula.reads or is_told:
            continue
        _TOLD.add((option, spec.loss_agg_mode))
        warnings.warn(
            f"{option}={value!r} changes nothing: loss_agg_mode={spec.loss_agg_mode!r}, whose "
            f"weights are {spec.formula.weight}, does not read it. {_WHO_READS_IT[option]}",
            stacklevel=_stacklevel_of_caller(),
        )


@contextmanager
def judged_already() -> Iterator[None]:
    """For options of a config: it has warned, and what its preset sets nobody wrote."""
    token = _IS_JUDGED.set(True)
    try:
        yield
    finally:
        _IS_JUDGED.reset(token)


def _stacklevel_of_caller() -> int:
    """For a warning of `warn_of_unread`: the line outside the package that called it."""
    level, frame = 1, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
