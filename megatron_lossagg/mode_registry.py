"""Modes by name: the built-in ones, those of `length_power` and those that a user registers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from torch import Tensor

from megatron_lossagg.length_power import exponent_of, length_power, mode_name
from megatron_lossagg.mode_table import (
    BUILT_IN,
    AggregationMode,
    ModeInputs,
    reciprocal_or_zero,
)

_MODES = dict(BUILT_IN)


def mode_names() -> tuple[str, ...]:
    """The known values of `loss_agg_mode`, without those of `length_power`."""
    return tuple(_MODES)


def registered_names() -> tuple[str, ...]:
    """The modes that `register_mode` added, in this process or in a module to import."""
    _import_registered()
    return tuple(name for name in _MODES if name not in BUILT_IN)


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

    Every rank must register it, and a command line finds it through the environment variable
    `MEGATRON_LOSSAGG_IMPORT`, a comma-separated list of modules to import.

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
    return mode


def _import_registered() -> None:
    """Import the modules that register modes, once."""
    names = os.environ.get("MEGATRON_LOSSAGG_IMPORT", "")
    for module in filter(None, (name.strip() for name in names.split(","))):
        importlib.import_module(module)


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
        _import_registered()
    if not isinstance(loss_agg_mode, str) or loss_agg_mode not in _MODES:
        raise ValueError(
            f"Unknown loss_agg_mode {loss_agg_mode!r}; expected one of {', '.join(_MODES)}, or "
            "length-power-A with a number A."
        )
    return _MODES[loss_agg_mode]
