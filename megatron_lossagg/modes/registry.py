"""Modes by name: the built-in ones, those of `length_power` and those that a user registers."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable

from torch import Tensor

from megatron_lossagg.modes.length_power import exponent_of, length_power, mode_name
from megatron_lossagg.modes.table import (
    BUILT_IN,
    AggregationMode,
    ModeInputs,
    reciprocal_or_zero,
)

IMPORT_VARIABLE = "MEGATRON_LOSSAGG_IMPORT"
OWN_MODES_HINT = (
    "a mode of your own is known once the module that registers it is imported: --import MODULE on "
    f"a command line, or the environment variable {IMPORT_VARIABLE}"
)
_MODES = dict(BUILT_IN)
# Of each registered mode the module that registered it, and that module's file.
_PLACES: dict[str, str] = {}


def mode_names() -> tuple[str, ...]:
    """The known values of `loss_agg_mode`, without those of `length_power`."""
    return tuple(_MODES)


def registered_names() -> tuple[str, ...]:
    """The modes that `register_mode` added, in this process or in a module to import."""
    import_named_modules()
    return tuple(name for name in _MODES if name not in BUILT_IN)


def registered_by(name: str) -> str:
    """The module that registered a mode, with its file."""
    return _PLACES[name]


def register_mode(
    name: str,
    sequence_factor: Callable[[Tensor, ModeInputs], Tensor],
    *,
    checksum: Callable[[ModeInputs], Tensor] | None = None,
    divisor: Callable[[ModeInputs], Tensor] | None = None,
    needs_units: bool = False,
) -> AggregationMode:
    """Add a mode of your own, which then works wherever a `loss_agg_mode` is named.

        register_mode("sqrt-length", lambda n_s, c: 1 / (c.num_seqs * n_s.sqrt()))

    Every rank must register it, and a command line finds it through its option `--import` or the
    environment variable `MEGATRON_LOSSAGG_IMPORT`: modules to import, separated by commas, which
    may lie in the current folder.

    Args:
        name: its `loss_agg_mode`.
        sequence_factor: (n_s float64 [n], ModeInputs) -> the weight of a valid token of each
            sequence, float64, broadcastable to [n]. What it gives for n_s = 0 is not used.
        checksum: see `AggregationMode`.
        divisor: see `AggregationMode`; without it the mode cannot be deferred.
        needs_units: see `AggregationMode`.

    Raises:
        ValueError: a mode of that name exists. TypeError: no text, or nothing callable.
    """
    if not isinstance(name, str) or not name or not callable(sequence_factor):
        raise TypeError(
            "register_mode expects a name and a function (n_s, counts) -> weight per sequence, got "
            f"{name!r} and {type(sequence_factor).__name__}."
        )
    mode = AggregationMode(name, sequence_factor, checksum, needs_units, divisor)
    if name in _MODES or exponent_of(name) is not None:
        raise ValueError(f"register_mode: {name!r} exists already; choose another name.")
    _MODES[name] = mode
    caller = sys._getframe(1).f_globals
    _PLACES[name] = f"{caller.get('__name__')} ({caller.get('__file__', 'no file')})"
    return mode


def import_named_modules() -> None:
    """Import the modules that `MEGATRON_LOSSAGG_IMPORT` names; they may lie in the current folder.

    Raises:
        ValueError: one of them cannot be imported; says which, why and where it was looked for.
    """
    names = os.environ.get(IMPORT_VARIABLE, "")
    for module in filter(None, (name.strip() for name in names.split(","))):
        # A console script does not look there. Behind all else, so that a folder in it hides no
        # installed package.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"cannot import {module!r}, named by --import or {IMPORT_VARIABLE}: "
                f"{_in_one_line(error)}. Looked in PYTHONPATH, the installed packages and the "
                f"current folder {os.getcwd()}."
            ) from error


def _in_one_line(error: BaseException) -> str:
    """The error, and the line of a user's file that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{frame.filename}, line {frame.lineno}"
        for frame in frames
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    return f"{text} ({places[-1]})" if places else text


def _length_power_mode(exponent: float) -> AggregationMode:
    """n_s^-A / B."""
    return AggregationMode(
        mode_name(exponent),
        lambda n_s, c: length_power(n_s, exponent) * reciprocal_or_zero(c.num_seqs),
        divisor=lambda c: c.num_seqs,
    )


def get_mode(loss_agg_mode: str) -> AggregationMode:
    """Look a mode up by name; raises ValueError naming the known ones."""
    exponent = exponent_of(loss_agg_mode) if isinstance(loss_agg_mode, str) else None
    if exponent is not None:
        return _length_power_mode(exponent)
    if isinstance(loss_agg_mode, str) and loss_agg_mode not in _MODES:
        import_named_modules()
    if not isinstance(loss_agg_mode, str) or loss_agg_mode not in _MODES:
        raise ValueError(
            f"Unknown loss_agg_mode {loss_agg_mode!r}; expected one of {', '.join(_MODES)}, or "
            f"length-power-A with a number A; {OWN_MODES_HINT}."
        )
    return _MODES[loss_agg_mode]
