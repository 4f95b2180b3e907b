"""Reads a mapping, such as a YAML file or overrides of one, into a dataclass by its field types.

All files, presets and overrides are read here, so that a value means the same wherever it stands:

    float   a number, or text that is one: PyYAML takes 2e3, which has no point, for text
    int     the same, if the number is whole: 4, "4", 1e3
    bool    true or false, or text that YAML would read as one: true, yes, on; false, no, off
    str     text alone: a name that YAML reads as a number or a flag needs quotes

Whoever calls from Python passes values of the right type: constructors convert nothing.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isnan
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")
_FLAGS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
# Above it a float stands for more than one whole number.
_MAX_WHOLE_FLOAT = 2.0**53


def read_dataclass(cls: type[T], values: Any, where: str = "") -> T:
    """Build a dataclass from a mapping, checking its keys and converting its values.

    A field that is a dataclass is read alike. If that has a class method `from_dict(values, *,
    where)`, it reads itself; with `parse(text)` it may be given as text, too.

    Args:
        cls: the dataclass.
        values: its fields by name, as YAML gives them.
        where: the place of `values` in a larger mapping, such as "optimizer", for messages.

    Returns:
        An instance of `cls`; fields that are left out have their defaults.

    Raises:
        ValueError: no mapping; unknown or missing keys; or a value that cannot be read.
    """
    dataclass: Any = cls
    annotations = _annotations(dataclass)
    check_keys(values, annotations, where)
    is_required = {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(dataclass)
    }
    missing = [name for name in annotations if is_required[name] and name not in values]
    if missing:
        raise ValueError(f"{_prefix(where)}missing option(s) {', '.join(missing)}.")
    return cls(
        **{
            name: read_value(annotations[name], value, f"{where}.{name}" if where else name)
            for name, value in values.items()
        }
    )


def set_option(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Override one option of a mapping that `read_dataclass` is to read, in place.

    Args:
        values: the mapping; sections that are missing are made.
        dotted: the option's place, such as "optimizer.lr"; an entry of a list of mappings is
            addressed by its name, as in "loss_agg.terms.kl.coefficient".
        value: what to put there.

    Raises:
        ValueError: a section on the way is neither a mapping nor a list with such an entry.
    """
    *sections, key = dotted.split(".")
    target: Any = values
    for section in sections:
        if isinstance(target, list):
            names = [entry.get("name") for entry in target if isinstance(entry, dict)]
            if section not in names:
                raise ValueError(
                    f"Cannot set {dotted}: there is no {section} there, only "
                    f"{', '.join(map(str, names))}. Add it where these are written."
                )
            target = target[names.index(section)]
        else:
            target = target.setdefault(section, {})
        if not isinstance(target, dict | list):
            raise ValueError(f"Cannot set {dotted}: {section} is no section.")
    if not isinstance(target, dict):
        raise ValueError(f"Cannot set {dotted}: name the entry of {sections[-1]} and its option.")
    target[key] = value


def check_keys(values: Any, known: Iterable[str], where: str = "") -> None:
    """Raise ValueError unless `values` is a mapping that has no other keys than the known ones."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{_prefix(where)}expected a mapping of options, got {type(values).__name__}."
        )
    known = tuple(known)
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ValueError(
            f"{_prefix(where)}unknown option(s) {', '.join(unknown)}; known ones: "
            f"{', '.join(known)}."
        )


def read_value(annotation: Any, value: Any, name: str) -> Any:
    """`value` as the type that a field is annotated with; raises ValueError naming the option."""
    annotation = _member(annotation, value)
    if annotation is Any or (annotation is None and value is None):
        return value
    if is_dataclass(annotation):
        return _read_member_dataclass(annotation, value, name)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(f"{name} must be a list, got {value!r} of type {_type(value)}.")
        return tuple(
            read_value(arguments[0], entry, _entry_name(name, index, entry))
            for index, entry in enumerate(value)
        )
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping, got {value!r} of type {_type(value)}.")
        return {
            key: read_value(arguments[1], entry, f"{name}.{key}") for key, entry in value.items()
        }
    return _READERS[annotation](value, name)


def read_number(value: Any, name: str) -> float:
    """A float from a number or text; raises ValueError on anything else and on NaN."""
    number = float("nan")
    if isinstance(value, Real | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (OverflowError, ValueError):
            pass
    if isnan(number):
        raise ValueError(f"{name} must be a number, got {value!r} of type {_type(value)}.")
    return number


def read_integer(value: Any, name: str) -> int:
    """An int from a whole number or text; raises ValueError on anything else."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    try:
        if isinstance(value, str):
            return int(value)
    except ValueError:
        pass  # such as 1e3
    try:
        number = read_number(value, name)
    except ValueError:
        number = float("nan")
    if not number.is_integer() or abs(number) > _MAX_WHOLE_FLOAT:
        raise ValueError(f"{name} must be a whole number, got {value!r} of type {_type(value)}.")
    return int(number)


def read_flag(value: Any, name: str) -> bool:
    """A bool from true, false or text; raises ValueError on anything else."""
    flag = _FLAGS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError(f"{name} must be true or false, got {value!r} of type {_type(value)}.")
    return flag


def read_text(value: Any, name: str) -> str:
    """Text as it is; raises ValueError on anything else."""
    if not isinstance(value, str):
        hint = "" if value is None else "; put it in quotes if it is a name"
        raise ValueError(f"{name} must be text, got {value!r} of type {_type(value)}{hint}.")
    return value


def check_flags(**flags: Any) -> None:
    """Raise TypeError unless each is True or False: to Python every other text is true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r} of type {_type(value)}.")


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    bool: read_flag,
    int: read_integer,
    float: read_number,
    str: read_text,
}


@cache
def _annotations(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def _member(annotation: Any, value: Any) -> Any:
    """Of a union the type that `value` is to be read as; None for None."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    if value is None and len(members) < len(typing.get_args(annotation)):
        return None
    is_structured = isinstance(value, Mapping) or is_dataclass(value)
    return next((m for m in members if is_dataclass(m) == is_structured), members[0])


def _read_member_dataclass(cls: Any, value: Any, name: str) -> Any:
    if isinstance(value, cls):
        return value
    if hasattr(cls, "parse") and not isinstance(value, Mapping):
        try:
            return cls.parse(str(value))  # says what it expects where that is no text
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if hasattr(cls, "from_dict"):
        return cls.from_dict(value, where=name)
    return read_dataclass(cls, value, name)


def _entry_name(name: str, index: int, entry: Any) -> str:
    """How messages call an entry of a list: by its own name if it has one."""
    own = entry.get("name") if isinstance(entry, Mapping) else None
    return f"{name}.{own}" if own and isinstance(own, str) else f"{name}[{index}]"


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _type(value: Any) -> str:
    return type(value).__name__
