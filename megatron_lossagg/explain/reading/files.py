"""From a file to `Rollouts`: JSONL line by line, parquet batch by batch, masks in an `.npz`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megatron_lossagg.explain.reading.fields import FieldOptions, Fields, RowReader
from megatron_lossagg.explain.reading.mask_file import read_npz
from megatron_lossagg.explain.rollouts import Rollouts, shown


def read_rollouts(path: Path, options: FieldOptions) -> Rollouts:
    """Read rollouts from `.jsonl`, `.ndjson`, `.parquet` or `.npz`.

    Args:
        path: the file.
        options: the fields that the caller named.

    Returns:
        The rollouts of the whole file.

    Raises:
        ValueError: the file cannot be read, is of another kind, lacks a field, is empty or holds a
            value that cannot be; the message begins with the path (and the line).
        ImportError: the package that reads this kind is not installed.
    """
    readers: dict[str, Callable[[Path, FieldOptions], Rollouts]] = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".parquet": _read_parquet,
        ".npz": read_npz,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"{path}: cannot tell from its name what is in it; expected a file that ends in "
            f"{', '.join(readers)}"
        )
    try:
        return reader(path, options)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path, options: FieldOptions) -> Rollouts:
    rows = RowReader(options)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.add(_json_object(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return _built(rows, path)


def _json_object(line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg} at column {error.colno}); expected one object a line"
        ) from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply; expected one flat object") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    return value


def _read_parquet(path: Path, options: FieldOptions) -> Rollouts:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        fields = _parquet_fields(file.schema_arrow.names, options, path)
        rows = RowReader(options, fields)
        for batch in file.iter_batches(batch_size=1024, columns=fields.names):
            for row in batch.to_pylist():
                number += 1
                try:
                    rows.add(row)
                except ValueError as error:
                    raise ValueError(f"{path}: row {number}: {error}") from error
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file that can be read: {error}") from error
    return _built(rows, path)


def _parquet_fields(names: list[str], options: FieldOptions, path: Path) -> Fields:
    try:
        return Fields.choose(names, options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _built(rows: RowReader, path: Path) -> Rollouts:
    try:
        return rows.build()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
