"""What `megatron-lossagg verify` runs: options from a YAML file and from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_lossagg.cli.verify.releases_table import chosen_releases
from megatron_lossagg.modes.length_power import exponent_of
from megatron_lossagg.modes.registry import OWN_MODES_HINT, registered_names
from megatron_lossagg.schedule.options import CP_GRADIENTS
from megatron_lossagg.testing.batch.packed_batch import PACKED_FORMS
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.typed_fields import check_keys, read_dataclass
from megatron_lossagg.verification.aggregator_plan import PLANNINGS, AggregatorPlan
from megatron_lossagg.verification.cases import (
    ALL_REGIMES,
    DEFAULT_LAYOUTS,
    DEFAULT_MODES,
    REGIMES,
    Case,
    default_cases,
)
from megatron_lossagg.verification.release_matrix import MATRIX_LAYOUTS

_KNOWN = {
    "modes": tuple(DEFAULT_MODES),
    "regimes": tuple(ALL_REGIMES),
    "planning": PLANNINGS,
    "cp_gradient": CP_GRADIENTS,
}


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The cases of one run: the product of all that is named here."""

    layouts: tuple[Layout, ...] = tuple(layout for layout, _ in DEFAULT_LAYOUTS)
    """As text: such as "PP=2 D=2 M=4", separated by ';'."""

    modes: tuple[str, ...] = tuple(DEFAULT_MODES)
    """Labels of `DEFAULT_MODES`, registered modes or length-power-A; as text separated by ','."""

    regimes: tuple[str, ...] = REGIMES
    """Of R1, R2, R3, R4."""

    planning: tuple[str, ...] = PLANNINGS
    """Of begin_step, wrap."""

    packed: bool = False
    """Whether microbatches are packed sequences, in both forms, instead of padded rows."""

    cp_gradient: tuple[str, ...] = ("local",)
    """Of local, replicated-value, gathered."""

    releases: tuple[str, ...] = ()
    """Of `releases.RELEASES`, to run on instead of the installed one; as text also "all"."""

    @classmethod
    def load(cls, path: str | Path | None, overrides: Mapping[str, Any]) -> VerifyConfig:
        """Read a YAML file, if there is one, and put `overrides` that are not None above it.

        Each option but `packed` is a list, or text as on the command line.

        Raises:
            ValueError: the file cannot be read, or an option is unknown or of no use.
        """
        values = {} if path is None else _read(path, [field.name for field in fields(cls)])
        values |= {name: value for name, value in overrides.items() if value is not None}
        values = {name: _listed(name, value) for name, value in values.items()}
        if values.get("releases"):
            values.setdefault("layouts", [layout for layout, _ in MATRIX_LAYOUTS])
        config = read_dataclass(cls, values)
        if config.releases:
            chosen = chosen_releases(",".join(config.releases))
            config = replace(config, releases=tuple(chosen))
        return config

    def __post_init__(self) -> None:
        """Raise ValueError on unknown names, and if a convention has no layout to show in."""
        for name in ("layouts", *_KNOWN, "releases"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for name, known in _KNOWN.items():
            _check_names(name, getattr(self, name), known)
        if self.cp_gradient != ("local",) and all(layout.cp == 1 for layout in self.layouts):
            raise ValueError(
                f"cp_gradient {', '.join(self.cp_gradient)} needs a layout with context "
                f"parallelism, such as 'C=2 M=2', got {'; '.join(map(str, self.layouts))}"
            )

    def plans(self) -> dict[str, AggregatorPlan]:
        """The plan of each mode."""
        return {label: DEFAULT_MODES.get(label) or AggregatorPlan(label) for label in self.modes}

    def cases(self) -> list[Case]:
        """What to run, in order."""
        places = dict(DEFAULT_LAYOUTS)
        return default_cases(
            [(layout, places.get(layout, "all")) for layout in self.layouts],
            self.regimes,
            self.planning,
            PACKED_FORMS if self.packed else ("rows",),
            self.cp_gradient,
        )


def _read(path: str | Path, known: list[str]) -> dict[str, Any]:
    """The options of a YAML file."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    check_keys(values, known, str(path))
    return dict(values)


def _listed(name: str, value: Any) -> Any:
    """A list for text with separators; other values as they are."""
    if name == "packed":
        return value
    listed = value
    if isinstance(value, str):
        parts = value.split(";" if name == "layouts" else ",")
        listed = [part.strip() for part in parts if part.strip()]
    if listed == []:
        raise ValueError(f"{name} {value!r} names none")
    return listed


def _check_names(name: str, texts: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise ValueError on a text that is not known; a mode may also be a registered one."""
    hint = ""
    if name == "modes":
        known, hint = (*known, *registered_names()), f", length-power-A; {OWN_MODES_HINT}"
    wrong = [
        repr(text)
        for text in texts
        if text not in known and (name != "modes" or exponent_of(text) is None)
    ]
    if wrong:
        raise ValueError(f"{name}: {', '.join(wrong)} is none of {', '.join(known)}{hint}")
