"""Modes by name: the built-in ones, those of `length_power` and those that a user registers."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_lossagg.modes.length_power import exponent_of, formula_of, length_power, mode_name
from megatron_lossagg.modes.options import OPTION_NAMES
from megatron_lossagg.modes.place import Place
from megatron_lossagg.modes.table import (
    BUILT_IN,
    AggregationMode,
    Formula,
    ModeInputs,
    reciprocal_or_zero,
)

IMPORT_VARIABLE = "MEGATRON_LOSSAGG_IMPORT"
OWN_MODES_HINT = (
    "a mode of your own is known once the module that registers it is imported: --import MODULE on "
    f"a command line, or the environment variable {IMPORT_VARIABLE}"
)
_MODES = dict(BUILT_IN)
_PLACES: dict[str, Place] = {}


def mode_names() -> tuple[str, ...]:
    """The known values of `loss_agg_mode`, without those of `length_power`."""
    return tuple(_MODES)


def registered_names() -> tuple[str, ...]:
    """The modes that `register_mode` added, in this process or in a module to import."""
    import_named_modules()
    return tuple(name for name in _MODES if name not in BUILT_IN)


def registered_by(name: str) -> str:
    """The module that registered a mode, with its file."""
    return str(_PLACES[name])


def register_mode(
    name: str,
    sequence_factor: Callable[[Tensor, ModeInputs], Tensor],
    *,
    checksum: Callable[[ModeInputs], Tensor] | None = None,
    divisor: Callable[[ModeInputs], Tensor] | None = None,
    needs_units: bool = False,
    weight: str | None = None,
    sum_of_weights: str | None = None,
    reads: Sequence[str] = OPTION_NAMES,
) -> AggregationMode:
    """Add a mode of your own, which then works wherever a `loss_agg_mode` is named.

        register_mode("sqrt-length", lambda n_s, c: 1 / (c.num_seqs * n_s.sqrt()))

    Every rank must register it, and a command line finds it through its option `--import` or the
    environment variable `MEGATRON_LOSSAGG_IMPORT`: modules to import, separated by commas, which
    may lie in the current folder. Registered again from its own place, as by a cell of a notebook
    that is run twice or a module that is reloaded, a mode is replaced.

    Args:
        name: its `loss_agg_mode`.
        sequence_factor: (n_s float64 [n], ModeInputs) -> the weight of a valid token of each
            sequence, float64, broadcastable to [n]. What it gives for n_s = 0 is not used.
        checksum: see `AggregationMode`.
        divisor: see `AggregationMode`; without it the mode cannot be deferred.
        needs_units: see `AggregationMode`.
        weight: the factor in symbols, such as "1 / (B * sqrt(n_s))", which commands show.
        sum_of_weights: what `checksum` computes, in symbols.
        reads: the fields of `ModeOptions` that it depends on; a warning tells whoever sets others.

    Returns:
        The mode.

    Raises:
        ValueError: another place registered that name, or it is built in; an option that does not
            exist.
        TypeError: no text, or nothing callable.
    """
    if not isinstance(name, str) or not name or not callable(sequence_factor):
        raise TypeError(
            "register_mode expects a name and a function (n_s, counts) -> weight per sequence, got "
            f"{name!r} and {type(sequence_factor).__name__}."
        )
    unknown = sorted(set(reads) - set(OPTION_NAMES))
    if unknown:
        raise ValueError(
            f"register_mode: reads has {', '.join(unknown)}; the options of a mode are "
            f"{', '.join(OPTION_NAMES)}."
        )
    place = Place.of(sys._getframe(1))
    _check_name_is_free(name, place)
    if sum_of_weights is None and checksum is not None:
        sum_of_weights = f"what its checksum in {place.module} computes (no formula given)"
    mode = AggregationMode(
        name,
        sequence_factor,
        checksum,
        needs_units,
        divisor,
        formula=Formula(
            weight or f"its function in {place.module} (no formula given)",
            sum_of_weights,
            tuple(reads),
        ),
    )
    _MODES[name], _PLACES[name] = mode, place
    return mode


def _check_name_is_free(name: str, place: Place) -> None:
    """Raise ValueError unless the name is new, or was registered at the same place."""
    before = _PLACES.get(name)
    if exponent_of(name) is not None or (name in _MODES and before is None):
        raise ValueError(f"register_mode: {name!r} exists already; choose another name.")
    if name in _MODES and before is not None and not before.is_replaced_by(place):
        raise ValueError(
            f"register_mode: {name!r} exists already: {before}, line {before.line}, registered it, "
            f"and now {place}, line {place.line}. Choose another name for one of them."
        )


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
        formula=formula_of(f"{exponent:.12g}"),
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
