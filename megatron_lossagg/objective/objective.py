"""The objective of an aggregator: its terms and metrics, and which weights they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_lossagg.modes import ModeOptions
from megatron_lossagg.modes.unread import warn_of_unread
from megatron_lossagg.objective.compile.compiled import CompiledSums
from megatron_lossagg.objective.evaluation import Evaluation, Sums
from megatron_lossagg.objective.microbatch_report import ReportNames
from megatron_lossagg.objective.terms import LossTerm
from megatron_lossagg.weights.metrics import Metric
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting, distinct_masks

LossFn = Callable[[Any, Mapping[str, Any]], Any]


class Objective:
    """Terms, metrics and the distinct weightings that they need.

    The first weighting belongs to `loss_mask` if any does: Megatron counts its tokens.
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
            Metric(name, term.name, normaliser, term.spec, term.mask_key)
            for term in terms
            for name, normaliser in term.metrics.items()
        )
        self.metric_sums = tuple(m for m in self.metrics if not m.is_extreme)
        self.extremes = tuple(m for m in self.metrics if m.is_extreme)
        self.reported_terms = self.terms if report_terms else ()
        self.names = ReportNames(
            ("loss", *(term.name for term in self.reported_terms)),
            tuple(m.name for m in self.metric_sums),
            tuple(m.name for m in self.extremes),
        )
        _check_distinct([name for names in self.names for name in names])
        self.weightings = self._distinct_weightings()
        self.evaluation = Evaluation(
            terms, self.metrics, self.weightings, report_terms=report_terms
        )
        self._sums_of = CompiledSums(self.evaluation) if compile else self.evaluation.sums_of

    def _distinct_weightings(self) -> tuple[Weighting, ...]:
        found = list(dict.fromkeys(self._term_weightings))
        main = [i for i, w in enumerate(found) if w.mask_key == MAIN_MASK]
        if main:
            found.insert(0, found.pop(main[0]))
        return tuple(found)

    @property
    def mask_keys(self) -> tuple[str, ...]:
        """The distinct masks of the terms, `loss_mask` first if a term uses it."""
        return distinct_masks(self.weightings)

    @property
    def places_of_metric_sums(self) -> tuple[int, ...]:
        """For each metric that is a sum, the place of its term's weighting."""
        place = {t.name: self.weightings.index(t.weighting) for t in self.terms}
        return tuple(place[metric.term] for metric in self.metric_sums)

    def masks_of_terms_that_train(self, coefficients: Sequence[float]) -> tuple[str, ...]:
        """The distinct masks of terms whose coefficient is not 0."""
        pairs = zip(self.terms, coefficients, strict=True)
        return tuple(dict.fromkeys(term.mask_key for term, c in pairs if c != 0))

    @property
    def has_coefficient_schedules(self) -> bool:
        """Whether a coefficient depends on the iteration."""
        return any(callable(term.coefficient) for term in self.terms)

    @property
    def has_checksums(self) -> bool:
        """Whether every mode tells the sum of its weights from counts alone."""
        return all(w.spec.mode.checksum is not None for w in self.weightings)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        terms = [
            (t.name, weighting, None if callable(t.coefficient) else float(t.coefficient))
            for t, weighting in zip(self.terms, self._term_weightings, strict=True)
        ]
        return (tuple(terms), self.metrics)

    def weights_keys(self, weights_key: str) -> tuple[str, ...]:
        """The field of a microbatch for each weighting: the key itself, then key_1, key_2, ...

        A field `loss_mask` keeps the mask itself where no term uses that mask: Megatron counts its
        tokens, and no weights could tell them. All weightings then have further fields.
        """
        keeps_mask = self.keeps_mask(weights_key)
        numbers = range(1, len(self.weightings) + (1 if keeps_mask else 0))
        further = (f"{weights_key}_{i}" for i in numbers)
        return tuple(further) if keeps_mask else (weights_key, *further)

    def keeps_mask(self, weights_key: str) -> bool:
        """Whether the field of that name holds `loss_mask` itself, beside the weights."""
        return weights_key == MAIN_MASK and self.weightings[0].mask_key != MAIN_MASK

    def coefficients(self, iteration: int | None) -> tuple[float, ...]:
        """c_k of every term."""
        return tuple(term.coefficient_at(iteration) for term in self.terms)

    def extreme_values(self, largest: Sequence[float]) -> list[float]:
        """Minima and maxima from maxima (minima negated); NaN over no valid token, or of a NaN."""
        return [
            math.nan if value == -math.inf else value if metric.normaliser == "max" else -value
            for metric, value in zip(self.extremes, largest, strict=True)
        ]

    def sums_of(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        *,
        rows_are_sequences: bool,
    ) -> Sums:
        """Evaluate every term and metric on a microbatch. No collective, no host sync."""
        if self._prepare is not None:
            output = self._prepare(output, microbatch)
        return self._sums_of(
            output, microbatch, tuple(weights), tuple(coefficients), rows_are_sequences
        )


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
    options: ModeOptions,
    metrics: Mapping[str, str] | None,
    report_counts: bool = False,
    compile: bool = False,
) -> Objective:
    """The objective of `LossAggregator`'s arguments: several terms, or one loss_fn with a mode.

    Raises:
        TypeError, ValueError: neither or both.
    """
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
            "the loss", loss_fn, loss_agg_mode, metrics=metrics or {}, **options.mode_options
        )
        objective = Objective([only], report_terms=False, compile=compile)
    else:
        given = {"loss_agg_mode": loss_agg_mode, "metrics": metrics, **options.not_default}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} cannot be given with terms: each LossTerm has its own."
            )
        objective = Objective(terms, loss_fn, compile=compile)
    for term in objective.terms:
        if not report_counts and not {"sequences", "units"} & set(term.metrics.values()):
            warn_of_unread(term.spec, term, ("sequence_count",))
    return objective
