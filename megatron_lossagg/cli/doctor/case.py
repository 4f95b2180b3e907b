"""The setting that `doctor` looks at, from a YAML file and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_lossagg.config.loss_agg_config import LossAggConfig
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.typed_fields import read_dataclass, read_value

# Of the model's config what a refusal or a factor depends on; `Any`: text, an enum or a function.
_MODEL_FLAGS: Mapping[str, Any] = {
    "calculate_per_token_loss": bool,
    "overlap_p2p_comm": bool,
    "batch_p2p_comm": bool,
    "hybrid_context_parallel": bool,
    "num_moe_experts": int | None,
    "mtp_num_layers": int | None,
    "moe_grad_scale_func": Any,
    "mtp_grad_scale_func": Any,
    "cuda_graph_scope": Any,
    "cuda_graph_impl": Any,
}


@dataclass(frozen=True)
class _Ranks:
    """Answers size() and rank() as the last rank of a process group does."""

    num_ranks: int

    def size(self) -> int:
        """Number of ranks."""
        return self.num_ranks

    def rank(self) -> int:
        """The last stage computes the loss."""
        return self.num_ranks - 1


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """`GlobalCounts` as a file has them."""

    num_tokens: int
    num_valid_seqs: int
    num_seqs: int


@dataclass(frozen=True, kw_only=True)
class _File:
    """What a file may have; defaults are those of `DoctorCase`."""

    layout: Layout | None = None
    loss_agg: LossAggConfig = LossAggConfig(loss_agg_mode="token-mean")
    model: Mapping[str, Any] = field(default_factory=dict)
    counts: _Counts | None = None


@dataclass(frozen=True)
class DoctorCase:
    """A layout, the plugin's options, flags of the model's config, and counts if they are known.

    `given_layout` is None where nobody has named one: then one rank and one microbatch are looked
    at.
    """

    given_layout: Layout | None = None
    loss_agg: LossAggConfig = LossAggConfig(loss_agg_mode="token-mean")
    model: Mapping[str, Any] = field(default_factory=dict)
    counts: GlobalCounts | None = None

    def __post_init__(self) -> None:
        _check_model_keys(self.model)
        flags = {
            name: read_value(_MODEL_FLAGS.get(name, Any), value, f"model.{name}")
            for name, value in self.model.items()
        }
        object.__setattr__(self, "model", flags)

    @classmethod
    def load(cls, path: Path | None) -> DoctorCase:
        """Read a YAML file with some of the keys layout, loss_agg, model and counts.

        Raises:
            ValueError: the path, and what is wrong with the file.
        """
        if path is None:
            return cls()
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            file = read_dataclass(_File, values)
            counts = None if file.counts is None else GlobalCounts(**vars(file.counts))
            return cls(file.layout, file.loss_agg, file.model, counts)
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: {error}") from error

    def with_overrides(
        self, *, layout: str | None, calculate_per_token_loss: bool | None, **loss_agg: Any
    ) -> DoctorCase:
        """The case with those flags that are not None."""
        case = self
        if layout is not None:
            case = replace(case, given_layout=Layout.parse(layout))
        if calculate_per_token_loss is not None:
            flags = {"calculate_per_token_loss": calculate_per_token_loss}
            case = replace(case, model={**case.model, **flags})
        given = {key: value for key, value in loss_agg.items() if value is not None}
        if given:
            options = {**case.loss_agg.to_dict(), **given}
            case = replace(case, loss_agg=LossAggConfig.from_dict(options))
        return case

    @property
    def layout(self) -> Layout:
        """The layout that is looked at."""
        return Layout() if self.given_layout is None else self.given_layout

    @property
    def calculate_per_token_loss(self) -> bool:
        """Megatron's flag of that name."""
        return bool(self.model.get("calculate_per_token_loss", False))

    @property
    def mode_spec(self) -> ModeSpec:
        """The mode with its options."""
        return self.loss_agg.main_spec

    def checksum_text(self, checksum: float | None) -> str:
        """What is known of the sum of all weights, and what every step compares it with."""
        spec = self.mode_spec
        mode = spec.mode
        if mode.checksum is None:
            return (
                f"Checksum of {mode.name}: the counts do not tell what its weights sum to; every "
                "step is compared with the sum of the weights that its plan made."
            )
        value = "" if checksum is None else f" = {checksum:.9g}"
        return (
            f"Checksum of {mode.name}: the weights of the global batch sum to "
            f"{spec.formula.sum_of_weights}{value}; "
            "every step is checked against it."
        )

    def model_flags(self) -> SimpleNamespace:
        """What stands for the model's `TransformerConfig`."""
        return SimpleNamespace(**{"calculate_per_token_loss": False, **self.model})

    def groups(self) -> ParallelGroups:
        """The sizes of the layout's groups, seen from a rank of the last stage."""
        size = self.layout
        return ParallelGroups(
            dp=_Ranks(size.dp),
            cp=_Ranks(size.cp),
            dp_cp=_Ranks(size.dp * size.cp),
            pp=_Ranks(size.pp),
            tp=_Ranks(size.tp),
            num_virtual_stages=size.vpp,
        )


def _check_model_keys(flags: Mapping[str, Any]) -> None:
    """Raise ValueError on a flag that neither the plugin nor the installed Megatron-Core knows."""
    if not all(name in _MODEL_FLAGS for name in flags):
        from megatron.core.transformer import TransformerConfig

        of_megatron = {f.name for f in fields(TransformerConfig)}
        unknown = [str(n) for n in flags if n not in _MODEL_FLAGS and n not in of_megatron]
        if unknown:
            raise ValueError(
                f"model: the installed Megatron-Core's TransformerConfig has no "
                f"{', '.join(unknown)}; doctor looks at {', '.join(_MODEL_FLAGS)}."
            )
