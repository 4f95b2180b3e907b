"""The objective of an aggregator: its terms and metrics, and which weights they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_lossagg.compiled import CompiledSums
from megatron_lossagg.evaluation import Evaluation, Metric, Sums
from megatron_lossagg.modes import get_mode
from megatron_lossagg.report import Totals
from megatron_lossagg.terms import LossTerm, Weighting, distinct_masks
from megatron_lossagg.typed_fields import check_flags

MAIN_MASK = "loss_mask"
LossFn = Callable[[Any, Mapping[str, Any]], Any]


class Objective:
    """Terms, metrics and the distinct weightings that they need.

    The first weighting belongs to the main mask, `loss_mask` (or the first term's if no term uses
    that), whose tokens are those that Megatron counts.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        prepare: LossFn | None = None,
        *,
        report_terms: bool = True,
        compile: bool = False,
    ) -> None:
        if not terms:
            raise ValueError("terms is empty; pass at least one LossTerm.")
        for term in terms:
            if not isinstance(term, LossTerm):
                raise TypeError(f"terms must be LossTerm objects, got {type(term).__name__}.")
        self.terms = tuple(terms)
        self._prepare = prepare
        # Made once: a mode checks its options whenever one is made.
        self._term_weightings = tuple(term.weighting for term in self.terms)
        self.metrics = tuple(
            Metric(name, term.name, normaliser, term.metric_weighting(name))
            for term in terms
            for name, normaliser in term.metrics.items()
        )
        self.sums = tuple(m for m in self.metrics if m.weighting is not None)
        self.extremes = tuple(m for m in self.metrics if m.weighting is None)
        term_names = [term.name for term in terms] if report_terms else []
        self.sum_names = ("loss", *term_names, *(m.name for m in self.sums))
        _check_distinct([*self.sum_names, *(m.name for m in self.extremes)])
        self.weightings = self._distinct_weightings()
        self.evaluation = Evaluation(
            terms, self.metrics, self.weightings, report_terms=report_terms
        )
        self._sums_of = CompiledSums(self.evaluation) if compile else self.evaluation.sums_of

    def _distinct_weightings(self) -> tuple[Weighting, ...]:
        needed = list(self._term_weightings)
        needed += [m.weighting for m in self.sums if m.weighting is not None]
        found = list(dict.fromkeys(needed))
        main = [i for i, w in enumerate(found) if w.mask_key == MAIN_MASK]
        if main:
            found.insert(0, found.pop(main[0]))
        return tuple(found)

    @property
    def mask_keys(self) -> tuple[str, ...]:
        """The distinct masks, the main one first."""
        return distinct_masks(self.weightings)

    @property
    def has_checksums(self) -> bool:
        """Whether every mode tells the sum of its weights from counts alone."""
        return all(get_mode(w.spec.loss_agg_mode).checksum is not None for w in self.weightings)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        terms = [
            (t.name, weighting, None if callable(t.coefficient) else float(t.coefficient))
            for t, weighting in zip(self.terms, self._term_weightings, strict=True)
        ]
        return (tuple(terms), self.metrics)

    def weights_keys(self, weights_key: str) -> tuple[str, ...]:
        """The field of a microbatch for each weighting: the key itself, then key_1, key_2, ..."""
        further = (f"{weights_key}_{i}" for i in range(1, len(self.weightings)))
        return (weights_key, *further)

    def coefficients(self, iteration: int | None) -> tuple[float, ...]:
        """c_k of every term."""
        return tuple(term.coefficient_at(iteration) for term in self.terms)

    def values_of(self, totals: Totals) -> dict[str, float]:
        """Every reported value of the global batch: sums first, divided once."""
        # Under R3 a batch without a valid token has denominator 0, and nothing divides.
        found = {
            name: numerator / denominator if denominator else numerator
            for name, (numerator, denominator) in zip(
                self.sum_names, totals.pairs.tolist(), strict=True
            )
        }
        for metric, value in zip(self.extremes, totals.extremes.tolist(), strict=True):
            value = value if metric.normaliser == "max" else -value
            found[metric.name] = value if math.isfinite(value) else math.nan
        return found

    def sums_of(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
    ) -> Sums:
        """Evaluate every term and metric on a microbatch. No collective, no host sync."""
        if self._prepare is not None:
            output = self._prepare(output, microbatch)
        return self._sums_of(output, microbatch, tuple(weights), tuple(coefficients))


def _check_distinct(names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"terms and metrics share the name(s) {', '.join(repeated)}; the report has one entry "
            "per name."
        )


def make_objective(
    loss_fn: LossFn | None,
    terms: Sequence[LossTerm] | None,
    *,
    loss_agg_mode: str | None,
    loss_scale_factor: float | None,
    norm_semantics: str,
    sequence_count: str,
    metrics: Mapping[str, str] | None,
    compile: bool = False,
) -> Objective:
    """The objective of `LossAggregator`'s arguments: several terms, or one loss_fn with a mode.

    Raises:
        TypeError, ValueError: neither or both.
    """
    check_flags(compile=compile)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, got {type(loss_fn).__name__}.")
    if terms is None:
        if loss_fn is None:
            raise TypeError("LossAggregator needs a loss_fn, or terms=[LossTerm(...), ...].")
        if loss_agg_mode is None:
            raise ValueError(
                "LossAggregator needs loss_agg_mode, for example 'token-mean', or terms with modes "
                "of their own."
            )
        only = LossTerm(
            "the loss",
            loss_fn,
            loss_agg_mode,
            loss_scale_factor=loss_scale_factor,
            norm_semantics=norm_semantics,
            sequence_count=sequence_count,
            metrics=metrics or {},
        )
        return Objective([only], report_terms=False, compile=compile)
    given = {
        "loss_agg_mode": loss_agg_mode,
        "loss_scale_factor": loss_scale_factor,
        "metrics": metrics,
        "norm_semantics": None if norm_semantics == "sum" else norm_semantics,
        "sequence_count": None if sequence_count == "valid" else sequence_count,
    }
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} cannot be given with terms: each LossTerm has its own."
        )
    return Objective(terms, loss_fn, compile=compile)
