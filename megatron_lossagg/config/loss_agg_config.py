"""`LossAggConfig`: the plugin's options as a frozen dataclass and as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_lossagg.config.options import LossAggOptions
from megatron_lossagg.config.presets import preset_options
from megatron_lossagg.config.term_config import TermConfig
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.modes.unread import warn_of_unread
from megatron_lossagg.objective.terms import LossTerm
from megatron_lossagg.typed_fields import check_keys, read_dataclass, read_value


@dataclass(frozen=True, kw_only=True)
class LossAggConfig(LossAggOptions):
    """The options of `LossAggregator`, and those of its terms; checked when built."""

    terms: tuple[TermConfig, ...] = ()
    """The summands of the objective; in YAML a list of mappings. Beside the key `preset` a term has
    the preset's mode and options unless it says otherwise; see `presets`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = read_value(tuple[TermConfig, ...], self.terms, "terms")
        object.__setattr__(self, "terms", terms)
        if not terms:
            if self.loss_agg_mode is None:
                raise ValueError(
                    "LossAggConfig needs 'loss_agg_mode', for example 'token-mean', or 'terms'."
                )
            warn_of_unread(self.main_spec, self)
            return
        if self.loss_agg_mode is not None:
            raise ValueError("Pass loss_agg_mode or terms, not both: each term has its mode.")
        given = ", ".join(self.not_default)
        if given:
            raise ValueError(f"{given} cannot be given beside terms: each term has its own.")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> LossAggConfig:
        """The options that reproduce a paper or a host framework; see `presets.PRESETS`.

            LossAggConfig.preset("dr_grpo", loss_scale_factor=4096)
            LossAggConfig.preset("verl-2026-08", loss_agg_mode="seq-mean-token-mean")

        Args:
            name: one of `presets.preset_names()`.
            **overrides: further options. What defines the preset cannot be changed, except by a
                term for itself; see `presets`.

        Returns:
            The config.

        Raises:
            ValueError: an unknown preset, one that is refused and why, a missing or another option.
        """
        return cls.from_dict({**overrides, "preset": name})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "") -> LossAggConfig:
        """Build one from a mapping, whose numbers and flags may be text; see `typed_fields`.

        The key `preset` names a preset, which the other keys complete.

        Args:
            values: options by name.
            where: their place in a larger mapping, for messages.

        Returns:
            The config.

        Raises:
            ValueError: unknown or missing options, or a value that is of no use.
        """
        check_keys(values, ("preset", *(field.name for field in fields(cls))), where)
        if "preset" in values:
            options = {key: value for key, value in values.items() if key != "preset"}
            values = preset_options(values["preset"], options)
        return read_dataclass(cls, values, where)

    @classmethod
    def from_yaml(cls, path: str | Path) -> LossAggConfig:
        """Read a YAML file: the options at its top level, or under the key `loss_agg`.

        Needs PyYAML (the extra `config`).

        Args:
            path: of the file.

        Returns:
            The config.

        Raises:
            ValueError: the path, and what is wrong with the file.
        """
        import yaml

        text = Path(path).read_text(encoding="utf-8")
        try:
            values = yaml.safe_load(text)
            if isinstance(values, Mapping) and "loss_agg" in values:
                values = values["loss_agg"]
            return cls.from_dict(values)
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values."""
        return {**self.aggregator_arguments(), "terms": [term.to_dict() for term in self.terms]}

    def to_yaml(self, path: str | Path) -> None:
        """Write all options to a YAML file that `from_yaml` reads back. Needs PyYAML."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @property
    def main_spec(self) -> ModeSpec:
        """The mode; with terms that of the first."""
        if self.terms:
            return self.terms[0].spec
        assert self.loss_agg_mode is not None  # one of both is given
        return ModeSpec.of(self.loss_agg_mode, self)

    def loss_terms(self, loss_fns: Any) -> list[LossTerm]:
        """The terms with their functions, given as a mapping by name.

        Args:
            loss_fns: name of a term -> its function.

        Returns:
            The terms, in their order.

        Raises:
            ValueError: a term without a function, or a function without a term.
        """
        names = [term.name for term in self.terms]
        if not isinstance(loss_fns, Mapping) or set(loss_fns) != set(names):
            given = sorted(loss_fns) if isinstance(loss_fns, Mapping) else type(loss_fns).__name__
            raise ValueError(
                f"The terms are {', '.join(names)}, but loss_fns has {given}; pass a mapping with "
                "one function per term."
            )
        return [term.with_loss_fn(loss_fns[term.name]) for term in self.terms]
