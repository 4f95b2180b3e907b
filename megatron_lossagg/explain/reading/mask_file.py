"""Masks or lengths of a global batch in an `.npz`: what `numpy.savez` of tensors gives."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lossagg.explain.reading.fields import FieldOptions, Fields
from megatron_lossagg.explain.rollouts import Rollouts, RolloutsBuilder


def read_npz(path: Path, options: FieldOptions) -> Rollouts:
    """Read `loss_mask` [b, s] of 0 and 1 (or lengths [b]), `rewards` [b] and `group_ids` [b].

    Rewards and groups are optional; other names of these are found, or named by `options`.

    Args:
        path: the file.
        options: the fields that the caller named.

    Returns:
        The rollouts of the whole file.

    Raises:
        ValueError: not such a file; the message begins with the path.
        ImportError: numpy is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        raise ImportError(f"{path}: reading .npz needs numpy: pip install numpy") from error
    try:
        arrays = numpy.load(path, allow_pickle=False)
        if isinstance(arrays, numpy.ndarray):
            raise ValueError("holds one array without a name; write it with numpy.savez")
        with arrays:
            return _read(arrays, options)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(arrays: Mapping[str, Any], options: FieldOptions) -> Rollouts:
    fields = Fields.choose(arrays, options)
    if fields.length_kind == "response":
        raise ValueError(
            f"{fields.length!r} holds responses, whose padding counts for nothing; save the mask "
            "[b, s] as 'loss_mask', or the lengths [b] as 'response_length'"
        )
    lengths = arrays[fields.length]
    origin = f"{fields.length!r}"
    if fields.length_kind == "mask":
        if lengths.ndim != 2:
            raise ValueError(
                f"{fields.length!r} must have shape [b, s], one sequence per row, got "
                f"{list(lengths.shape)}"
            )
        wrong = lengths[(lengths != 0) & (lengths != 1)]
        if wrong.size:
            raise ValueError(
                f"{fields.length!r} may hold only 0 and 1, got {wrong.size} other values such as "
                f"{wrong[0].item()!r}"
            )
        lengths = lengths.sum(axis=1, dtype="int64")
        origin = f"the sum of each row of {fields.length!r}"
    builder = RolloutsBuilder()
    per_sequence = [
        (fields.length, lengths, builder.add_length),
        (fields.reward, None, builder.add_reward),
        (fields.group, None, builder.add_group),
    ]
    for name, values, add in per_sequence:
        if name is None:
            continue
        values = arrays[name] if values is None else values
        if values.shape != lengths.shape[:1]:
            raise ValueError(
                f"{name!r} must have one value per sequence, [{len(lengths)}], got shape "
                f"{list(values.shape)}"
            )
        for row, value in enumerate(values.tolist()):
            try:
                add(value)
            except ValueError as error:
                raise ValueError(f"{name!r}, row {row}: {error}") from error
    return builder.build("tokens", fields.sources(origin))
