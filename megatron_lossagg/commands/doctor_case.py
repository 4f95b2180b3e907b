"""The setting that `doctor` looks at, from a YAML file and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_lossagg.config import LossAggConfig
from megatron_lossagg.global_counts import GlobalCounts
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.testing.layout import Layout

_KEYS = ("layout", "loss_agg", "model", "counts")
_COUNTS = ("num_tokens", "num_valid_seqs", "num_seqs")
_FORMULAS = {
    "token-mean": "1",
    "token-sum": "T",
    "seq-mean-token-sum": "T/B",
    "seq-mean-token-mean": "B_valid/B",
    "unit-mean-token-sum": "T/U",
    "unit-mean-token-mean": "U_valid/U",
    "unit-mean-seq-mean-token-mean": "U_valid/U",
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


@dataclass(frozen=True)
class DoctorCase:
    """A layout, the plugin's options, flags of the model's config, and counts if they are known."""

    layout: Layout = Layout()
    loss_agg: LossAggConfig = LossAggConfig(loss_agg_mode="token-mean")
    model: Mapping[str, Any] = field(default_factory=dict)
    counts: GlobalCounts | None = None

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
            _check_keys("the file", values, _KEYS)
            fields: dict[str, Any] = {}
            if "layout" in values:
                fields["layout"] = _layout(values["layout"])
            if "loss_agg" in values:
                fields["loss_agg"] = LossAggConfig.from_dict(values["loss_agg"])
            if "model" in values:
                _check_keys("model", values["model"], None)
                fields["model"] = values["model"]
            if "counts" in values:
                _check_keys("counts", values["counts"], _COUNTS)
                missing = [name for name in _COUNTS if name not in values["counts"]]
                if missing:
                    raise ValueError(f"counts lacks {', '.join(missing)}")
                fields["counts"] = GlobalCounts(**values["counts"])
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(**fields)

    def with_overrides(
        self, *, layout: str | None, calculate_per_token_loss: bool | None, **loss_agg: Any
    ) -> DoctorCase:
        """The case with those flags that are not None."""
        case = self
        if layout is not None:
            case = replace(case, layout=Layout.parse(layout))
        if calculate_per_token_loss is not None:
            flags = {"calculate_per_token_loss": calculate_per_token_loss}
            case = replace(case, model={**case.model, **flags})
        given = {key: value for key, value in loss_agg.items() if value is not None}
        if given:
            options = {**case.loss_agg.to_dict(), **given}
            case = replace(case, loss_agg=LossAggConfig.from_dict(options))
        return case

    @property
    def calculate_per_token_loss(self) -> bool:
        """Megatron's flag of that name."""
        return bool(self.model.get("calculate_per_token_loss", False))

    @property
    def mode_spec(self) -> ModeSpec:
        """The mode with its options."""
        return self.loss_agg.main_spec

    @property
    def checksum_formula(self) -> str:
        """What the weights of the global batch sum to, in symbols."""
        spec = self.mode_spec
        if spec.loss_agg_mode == "seq-mean-token-sum-norm":
            return "T/L" if spec.norm_semantics == "sum" else "T/(B L)"
        return _FORMULAS.get(spec.loss_agg_mode, "its checksum")

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


def _layout(value: Any) -> Layout:
    if isinstance(value, str):
        return Layout.parse(value)
    if isinstance(value, Mapping):
        return Layout(**value)
    raise ValueError(f"layout must be text such as 'PP=2 D=4 M=8' or a mapping, got {value!r}")


def _check_keys(where: str, values: Any, known: tuple[str, ...] | None) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a mapping, got {type(values).__name__}")
    unknown = [str(key) for key in values if known is not None and key not in known]
    if unknown:
        raise ValueError(
            f"{where} has unknown key(s) {', '.join(unknown)}; known ones: {', '.join(known or ())}"
        )
