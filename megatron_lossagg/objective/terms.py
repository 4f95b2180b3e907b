"""`LossTerm`: one summand of an RL objective, with a mode, a mask and a coefficient of its own.

    J = sum_k c_k J_k,    J_k = sum over the global batch of w_k * l_k

Terms that share a mode and a mask share one weight tensor; all masks are counted in one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor

from megatron_lossagg.modes.options import ModeOptions
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.modes.unread import warn_of_unread
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting

# A schedule gives the coefficient of an iteration.
Coefficient = float | Callable[[int], float]
TermFn = Callable[[Any, Mapping[str, Any]], Tensor | tuple[Tensor, Mapping[str, Tensor]]]

NORMALISERS = ("tokens", "sequences", "units", "sum", "min", "max")
# Names of a report that no term or metric can have.
RESERVED_NAMES = ("loss",)


@dataclass(frozen=True)
class LossTerm(ModeOptions):
    """One summand of the objective.

    Attributes:
        name: its entry in the report.
        loss_fn: (output, microbatch) -> losses of the mask's shape, not reduced; or (losses,
            {metric: values of the mask's shape}) with `metrics`. `output` is the model's output, or
            what the aggregator's own `loss_fn` made of it for all terms.
        loss_agg_mode: how its token losses are summed.
        coefficient: c_k, a number, or a function of the iteration that is passed to `begin_step` or
            `wrap`. A term of coefficient 0 is only reported: no gradient flows through it, and over
            no valid token it is NaN, as a metric is, where one that trains is 0.
        mask_key: the field of a microbatch with its mask, of the shape of `loss_mask`.
        metrics: name -> normaliser of what `loss_fn` returns besides, numbers or bools [b, s]:
            "tokens", "sequences" or "units" divide the sum over valid tokens by that count of the
            global batch, "sum" by nothing; "min" and "max" are over valid tokens. A metric [b] has
            one value per sequence ("sequences": their mean; "sum", "min", "max"): of rows that are
            whole sequences. Sums are float64; over no valid token a metric is NaN.
        spec: its mode with the options; these are keyword arguments, see `ModeOptions`.
        weighting: what its weights depend on.

    Raises:
        ValueError, TypeError: an unknown mode, option, normaliser, or a coefficient that is no
            finite number.
    """

    name: str
    loss_fn: TermFn
    loss_agg_mode: str
    coefficient: Coefficient = 1.0
    mask_key: str = MAIN_MASK
    metrics: Mapping[str, str] = field(default_factory=dict)
    spec: ModeSpec = field(init=False, repr=False, compare=False)
    weighting: Weighting = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name in RESERVED_NAMES:
            raise ValueError(
                f"LossTerm: name={self.name!r} cannot name a term; pass a text other than "
                f"{', '.join(map(repr, RESERVED_NAMES))}, which is the sum of all terms."
            )
        if not callable(self.loss_fn):
            raise TypeError(
                f"LossTerm {self.name!r}: loss_fn must be callable, got "
                f"{type(self.loss_fn).__name__}."
            )
        if not isinstance(self.mask_key, str) or not self.mask_key:
            raise ValueError(
                f"LossTerm {self.name!r}: mask_key={self.mask_key!r} cannot name a field."
            )
        if not callable(self.coefficient):
            _check_coefficient(self.name, self.coefficient)
        check_metrics(self.metrics)
        super().__post_init__()
        object.__setattr__(self, "spec", ModeSpec.of(self.loss_agg_mode, self))
        warn_of_unread(self.spec, self)
        object.__setattr__(self, "weighting", Weighting(self.spec, self.mask_key))

    def coefficient_at(self, iteration: int | None) -> float:
        """c_k of an iteration.

        Args:
            iteration: the step's number; needed where the coefficient is a function of it.

        Returns:
            c_k.

        Raises:
            ValueError: it is a schedule and no iteration was given, or no finite number came out.
        """
        if not callable(self.coefficient):
            return float(self.coefficient)
        if iteration is None:
            raise ValueError(
                f"LossTerm {self.name!r} has a schedule as coefficient, which needs the iteration: "
                "begin_step(..., iteration=i), or wrap(..., iteration=a function that gives it)."
            )
        value = self.coefficient(iteration)
        _check_coefficient(f"{self.name} at iteration {iteration}", value)
        return float(value)


def check_metrics(metrics: Any) -> None:
    """Raise unless it maps names to normalisers."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must map names to normalisers, such as {{'clip_fraction': 'tokens'}}, got "
            f"{type(metrics).__name__}."
        )
    for name, normaliser in metrics.items():
        if normaliser not in NORMALISERS:
            raise ValueError(
                f"metric {name!r}: normaliser {normaliser!r} does not exist; expected one of "
                f"{', '.join(NORMALISERS)}."
            )


def _check_coefficient(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(
            f"LossTerm {name!r}: the coefficient must be a finite number, or a function of the "
            f"iteration that gives one (in a file {{start, end, iterations}}); got {value!r}."
        )
