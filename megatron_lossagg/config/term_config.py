"""`TermConfig`: a `LossTerm` without its function, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from numbers import Real
from typing import Any

from torch import Tensor

from megatron_lossagg.modes.options import ModeOptions
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.objective.terms import LossTerm, TermFn
from megatron_lossagg.typed_fields import read_dataclass


@dataclass(frozen=True)
class LinearCoefficient:
    """A coefficient that goes from `start` to `end` in `iterations` steps and stays there."""

    start: float
    end: float
    iterations: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, Real) or not isfinite(number):
                raise ValueError(f"coefficient: {name} must be a finite number, got {number!r}.")
        is_int = isinstance(self.iterations, int) and not isinstance(self.iterations, bool)
        if not is_int or self.iterations < 1:
            raise ValueError(
                f"coefficient: iterations must be an int of at least 1, got {self.iterations!r}."
            )

    def __call__(self, iteration: int) -> float:
        """C of an iteration."""
        done = min(1.0, max(0.0, iteration / self.iterations))
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True, kw_only=True)
class TermConfig(ModeOptions):
    """Options of `LossTerm`, checked when built. Same names and meanings as its arguments."""

    name: str
    loss_agg_mode: str
    coefficient: float | LinearCoefficient = 1.0
    """A number, or a linear schedule {start, end, iterations}: `start` at iteration 0, `end` from
    iteration `iterations` on."""

    mask_key: str = "loss_mask"
    metrics: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.coefficient, Mapping):
            schedule = read_dataclass(LinearCoefficient, self.coefficient, "coefficient")
            object.__setattr__(self, "coefficient", schedule)
        try:
            super().__post_init__()
            self.with_loss_fn(_no_function)
        except ValueError as error:
            which = "" if repr(self.name) in str(error) else f"Term {self.name!r}: "
            raise ValueError(f"{which}{error}") from error

    def with_loss_fn(self, loss_fn: TermFn) -> LossTerm:
        """The term with its function."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return LossTerm(loss_fn=loss_fn, **options)

    @property
    def spec(self) -> ModeSpec:
        """The mode with its options."""
        return ModeSpec.of(self.loss_agg_mode, self)

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values."""
        values = asdict(self) | self.mode_options
        return {"name": values.pop("name"), "loss_agg_mode": values.pop("loss_agg_mode")} | values


def _no_function(output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    raise AssertionError("stands for a term's function while its options are checked")
