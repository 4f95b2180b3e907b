"""Reading a configuration: YAML, overridden from the command line, into checked dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from grpo.config import WEIGHTS_KEY, TrainingConfig
from grpo.terms import POLICY
from megatron_lossagg import LossAggConfig
from megatron_lossagg.presets import preset_options

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)


def load_config(
    config_class: type[ConfigT], path: str | Path, overrides: Mapping[str, Any] | None = None
) -> ConfigT:
    """Read a YAML file and apply overrides such as {"layout.dp": 4, "steps": 10}.

    Raises:
        ValueError: the file cannot be read, a key is unknown, or a value is of no use.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"Cannot read the configuration {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of options, got {type(values).__name__}.")
    for dotted, value in (overrides or {}).items():
        _set(values, dotted, value, path)
    try:
        return _build(config_class, values, "")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}{' with overrides' if overrides else ''}: {error}") from error


def _set(values: dict[str, Any], dotted: str, value: Any, path: str | Path) -> None:
    """Set one option; an entry of a list is addressed by its name, as in loss_agg.terms.kl."""
    *sections, key = dotted.split(".")
    loss_agg = values.get("loss_agg")
    if sections == ["loss_agg", "terms", POLICY] and isinstance(loss_agg, dict):
        if "terms" not in loss_agg:  # one mode, or a preset, is that of the policy term
            sections = ["loss_agg"]
    target: Any = values
    for section in sections:
        if isinstance(target, list):
            names = [entry.get("name") for entry in target if isinstance(entry, dict)]
            if section not in names:
                raise ValueError(
                    f"Cannot set {dotted}: there is no {section} in {path}, only "
                    f"{', '.join(map(str, names))}. Add it to a copy of that file (--config)."
                )
            target = target[names.index(section)]
            continue
        if section == "terms" and section not in target:
            raise ValueError(
                f"Cannot set {dotted}: {path} has no terms, so the policy loss is the only one. "
                "Write a list under loss_agg.terms in a copy of that file (--config)."
            )
        target = target.setdefault(section, {})
        if not isinstance(target, dict | list):
            raise ValueError(f"Cannot set {dotted}: {section} is no section in {path}.")
    if not isinstance(target, dict):
        raise ValueError(f"Cannot set {dotted}: name the entry of {sections[-1]} and its option.")
    target[key] = value


def _build(config_class: Any, values: Any, where: str) -> Any:
    """Build a dataclass from a mapping, checking keys and types; `where` names the section."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'the file'}: expected a mapping, got {values!r}.")
    if config_class is LossAggConfig and "preset" in values:
        options = {key: value for key, value in values.items() if key != "preset"}
        values = preset_options(values["preset"], options)
    annotations = typing.get_type_hints(config_class)
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    unknown = [str(key) for key in values if key not in fields]
    if unknown:
        raise ValueError(
            f"unknown option(s) {', '.join(where + key for key in unknown)}; known here: "
            f"{', '.join(fields)}."
        )
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [where + name for name in required if name not in values]
    if missing:
        raise ValueError(f"missing option(s) {', '.join(missing)}.")
    if config_class is LossAggConfig:
        values = {"weights_key": WEIGHTS_KEY, **values}
    return config_class(
        **{key: _convert(annotations[key], value, where + key) for key, value in values.items()}
    )


def _convert(annotation: Any, value: Any, name: str) -> Any:
    """`value` as the type that a field is annotated with; raises ValueError if it is none."""
    if dataclasses.is_dataclass(annotation):
        return _build(annotation, value, f"{name}.")
    if isinstance(annotation, types.UnionType):
        if value is None and type(None) in typing.get_args(annotation):
            return None
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, got {value!r}.")
        return tuple(value)
    if annotation is float and not isinstance(value, bool):
        # YAML reads 1e-3, without a point, as text.
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif isinstance(value, annotation) and not (annotation is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{name} must be of type {annotation.__name__}, got {value!r}.")
