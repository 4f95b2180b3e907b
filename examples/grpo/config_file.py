"""Reading a configuration: YAML, overridden from the command line, into checked dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from grpo.config import WEIGHTS_KEY, TrainingConfig
from grpo.terms import POLICY
from megatron_lossagg.config import read_dataclass, set_option

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
        _override(values, dotted, value, path)
    if isinstance(values.get("loss_agg"), dict):
        values["loss_agg"] = {"weights_key": WEIGHTS_KEY, **values["loss_agg"]}
    try:
        return read_dataclass(config_class, values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}{' with overrides' if overrides else ''}: {error}") from error


def _override(values: dict[str, Any], dotted: str, value: Any, path: str | Path) -> None:
    """Set one option; an entry of a list is addressed by its name, as in loss_agg.terms.kl."""
    loss_agg = values.get("loss_agg")
    if isinstance(loss_agg, dict) and "terms" not in loss_agg:
        of_policy = f"loss_agg.terms.{POLICY}."
        if dotted.startswith(of_policy):  # one mode, or a preset, is that of the policy term
            dotted = dotted.replace(of_policy, "loss_agg.")
        elif dotted.startswith("loss_agg.terms."):
            raise ValueError(
                f"Cannot set {dotted}: {path} has no terms, so the policy loss is the only one. "
                "Write a list under loss_agg.terms in a copy of that file (--config)."
            )
    set_option(values, dotted, value)
