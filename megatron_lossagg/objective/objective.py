"""`Objective`: its terms and metrics, and which weights they need. Data alone, no evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megatron_lossagg.modes.options import ModeOptions
from megatron_lossagg.modes.unread import warn_of_unread
from megatron_lossagg.objective.terms import LossTerm
from megatron_lossagg.weights.metrics import Metric
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting, distinct_masks

LossFn = Callable[[Any, Mapping[str, Any]], Any]


class ValueNames(NamedTuple):
    """The loss and the reported terms, metrics that are sums, minima and maxima, in their order."""

    values: tuple[str, ...]
    metric_sums: tuple[str, ...]
    extremes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Objective:
    """J = sum_k c_k J_k, J_k = sum over the global batch of w_k * l_k, and metrics beside it.

    `Evaluation` evaluates it on a microbatch. `Objective.of` builds one.

    Attributes:
        terms: the l_k, with their modes and coefficients c_k.
        weightings: the distinct ones of the terms; each has one tensor w [b, s] per microbatch. The
            first belongs to `loss_mask` if any does: Megatron counts its tokens.
        weighting_of_term: for each term the place of its weighting.
        metrics: of all terms, in their order.
        prepare: (output, microbatch) -> what every `loss_fn` gets as output; None: the output.
        reports_terms: whether S_k of every term is reported beside their total.
    """

    terms: tuple[LossTerm, ...]
    weightings: tuple[Weighting, ...]
    weighting_of_term: tuple[int, ...]
    metrics: tuple[Metric, ...]
    prepare: LossFn | None
    reports_terms: bool

    @classmethod
    def of(
        cls,
        terms: Sequence[LossTerm],
        prepare: LossFn | None = None,
        *,
        reports_terms: bool = True,
    ) -> Objective:
        """The objective of some terms.

        Args:
            terms: at least one.
            prepare: see there.
            reports_terms: see there.

        Returns:
            The objective.

        Raises:
            ValueError: no term, or a name that two terms or metrics share.
            TypeError: something else than terms.
        """
        if not terms:
            raise ValueError("terms is empty; pass at least one LossTerm.")
        for term in terms:
            if not isinstance(term, LossTerm):
                raise TypeError(f"terms must be LossTerm objects, got {type(term).__name__}.")
        of_terms = [term.weighting for term in terms]
        weightings = list(dict.fromkeys(of_terms))
        of_main_mask = [w for w in weightings if w.mask_key == MAIN_MASK]
        if of_main_mask:
            weightings.remove(of_main_mask[0])
            weightings.insert(0, of_main_mask[0])
        made = cls(
            terms=tuple(terms),
            weightings=tuple(weightings),
            weighting_of_term=tuple(weightings.index(weighting) for weighting in of_terms),
            metrics=tuple(
                Metric(name, term.name, normaliser, term.spec, term.mask_key)
                for term in terms
                for name, normaliser in term.metrics.items()
            ),
            prepare=prepare,
            reports_terms=reports_terms,
        )
        _check_distinct([name for names in made.names for name in names])
        return made

    @cached_property
    def metric_sums(self) -> tuple[Metric, ...]:
        """The metrics that are sums."""
        return tuple(m for m in self.metrics if not m.is_extreme)

    @cached_property
    def extremes(self) -> tuple[Metric, ...]:
        """The metrics that are minima and maxima."""
        return tuple(m for m in self.metrics if m.is_extreme)

    @cached_property
    def reported_terms(self) -> tuple[LossTerm, ...]:
        """The terms that are reported beside the total."""
        return self.terms if self.reports_terms else ()

    @cached_property
    def names(self) -> ValueNames:
        """The names of all values that a microbatch contributes to."""
        return ValueNames(
            ("loss", *(term.name for term in self.reported_terms)),
            tuple(m.name for m in self.metric_sums),
            tuple(m.name for m in self.extremes),
        )

    @cached_property
    def mask_keys(self) -> tuple[str, ...]:
        """The distinct masks of the terms, `loss_mask` first if a term uses it."""
        return distinct_masks(self.weightings)

    @cached_property
    def places_of_metric_sums(self) -> tuple[int, ...]:
        """For each metric that is a sum, the place of its term's weighting."""
        pairs = zip(self.terms, self.weighting_of_term, strict=True)
        place = {term.name: place for term, place in pairs}
        return tuple(place[metric.term] for metric in self.metric_sums)

    def masks_of_terms_that_train(self, coefficients: Sequence[float]) -> tuple[str, ...]:
        """The distinct masks of terms whose coefficient is not 0."""
        pairs = zip(self.terms, coefficients, strict=True)
        return tuple(dict.fromkeys(term.mask_key for term, c in pairs if c != 0))

    @cached_property
    def has_coefficient_schedules(self) -> bool:
        """Whether a coefficient depends on the iteration."""
        return any(callable(term.coefficient) for term in self.terms)

    @cached_property
    def has_checksums(self) -> bool:
        """Whether every mode tells the sum of its weights from counts alone."""
        return all(w.spec.mode.checksum is not None for w in self.weightings)

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
) -> Objective:
    """The objective of `LossAggregator`'s arguments: several terms, or one loss_fn with a mode.

    Args:
        loss_fn: of the aggregator.
        terms: of the aggregator.
        loss_agg_mode: without terms, the mode of the loss.
        options: the options of that mode.
        metrics: without terms, what `loss_fn` returns besides.
        report_counts: whether reports tell counts, so that `sequence_count` is read.

    Returns:
        The objective.

    Raises:
        TypeError: neither, or no function.
        ValueError: no mode, or options beside terms.
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
        objective = Objective.of([only], reports_terms=False)
    else:
        given = {"loss_agg_mode": loss_agg_mode, "metrics": metrics, **options.not_default}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} cannot be given with terms: each LossTerm has its own."
            )
        objective = Objective.of(terms, loss_fn)
    for term in objective.terms:
        if not report_counts and not {"sequences", "units"} & set(term.metrics.values()):
            warn_of_unread(term.spec, term, ("sequence_count",))
    return objective
