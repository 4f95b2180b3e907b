"""`TermConfig`: a `LossTerm` without its function, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from numbers import Real
from typing import Any

from torch import Tensor

from megatron_lossagg.terms import LossTerm, TermFn


@dataclass(frozen=True, kw_only=True)
class TermConfig:
    """Options of `LossTerm`, checked when built. Same names and meanings as its arguments."""

    name: str
    loss_agg_mode: str
    coefficient: float | Mapping[str, float] = 1.0
    """A number, or a linear schedule {start, end, iterations}: `start` at iteration 0, `end` from
    iteration `iterations` on."""

    mask_key: str = "loss_mask"
    loss_scale_factor: float | None = None
    norm_semantics: str = "sum"
    sequence_count: str = "valid"
    metrics: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.with_loss_fn(_no_function)
        except ValueError as error:
            which = "" if repr(self.name) in str(error) else f"Term {self.name!r}: "
            raise ValueError(f"{which}{error}") from error

    @classmethod
    def of(cls, value: Any) -> TermConfig:
        """From a mapping; raises ValueError naming unknown and missing keys."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"A term must be a mapping, got {type(value).__name__}.")
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in value if key not in known)
        missing = [name for name in ("name", "loss_agg_mode") if name not in value]
        if unknown or missing:
            wrong = [f"unknown: {', '.join(unknown)}"] if unknown else []
            wrong += [f"missing: {', '.join(missing)}"] if missing else []
            raise ValueError(f"A term has {'; '.join(wrong)}. Known keys: {', '.join(known)}.")
        return cls(**{key: _number(v) if key in _NUMBERS else v for key, v in value.items()})

    def with_loss_fn(self, loss_fn: TermFn) -> LossTerm:
        """The term with its function."""
        values = asdict(self)
        if isinstance(self.coefficient, Mapping):
            values["coefficient"] = LinearCoefficient.of(self.coefficient)
        return LossTerm(loss_fn=loss_fn, **values)


_NUMBERS = ("coefficient", "loss_scale_factor")


def _number(value: Any) -> Any:
    """A text such as 1e-3, which YAML does not read as a number without a point, as one."""
    if isinstance(value, Mapping):
        return {key: _number(v) for key, v in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # refused where it is used


@dataclass(frozen=True)
class LinearCoefficient:
    """A coefficient that goes from `start` to `end` in `iterations` steps and stays there."""

    start: float
    end: float
    iterations: int

    @classmethod
    def of(cls, value: Mapping[str, float]) -> LinearCoefficient:
        """From a mapping; raises ValueError on other keys or a length below 1."""
        if set(value) != {"start", "end", "iterations"}:
            raise ValueError(
                f"A coefficient is a number or {{start, end, iterations}}, got keys "
                f"{', '.join(map(str, value))}."
            )
        if not isinstance(value["iterations"], int) or value["iterations"] < 1:
            raise ValueError(
                f"coefficient: iterations must be an int of at least 1, got "
                f"{value['iterations']!r}."
            )
        for name in ("start", "end"):
            number = value[name]
            if isinstance(number, bool) or not isinstance(number, Real) or not isfinite(number):
                raise ValueError(f"coefficient: {name} must be a finite number, got {number!r}.")
        return cls(value["start"], value["end"], value["iterations"])

    def __call__(self, iteration: int) -> float:
        """C of an iteration."""
        done = min(1.0, max(0.0, iteration / self.iterations))
        return self.start + (self.end - self.start) * done


def _no_function(output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    raise AssertionError("stands for a term's function while its options are checked")
