"""The objective of an aggregator: its terms and metrics, and which weights they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.compiled import CompiledFunction
from megatron_lossagg.loss import check_token_losses, masked_weighted_sum
from megatron_lossagg.modes import get_mode
from megatron_lossagg.report import Totals
from megatron_lossagg.terms import LossTerm, Weighting, distinct_masks

MAIN_MASK = "loss_mask"
LossFn = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Metric:
    """A reported value that has no gradient.

    Attributes:
        name: its entry in the report.
        term: the term whose `loss_fn` returns it.
        normaliser: see `LossTerm`.
        weighting: whose weighted sum it is; None for an extreme value.
    """

    name: str
    term: str
    normaliser: str
    weighting: Weighting | None


@dataclass(frozen=True)
class Sums:
    """What one microbatch contributes on this rank.

    Attributes:
        total: sum of c_k S_k, the part of the objective, shape [], with its graph.
        values: total and the sums of the report, detached, [num_sums].
        extremes: maxima (minima negated) of this microbatch, detached, [num_extremes].
    """

    total: Tensor
    values: Tensor
    extremes: Tensor


class _Evaluation(NamedTuple):
    """S_k of every term with its graph; what is reported beside their total; extreme values."""

    partial_sums: list[Tensor]
    values: Tensor
    extremes: Tensor


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
        self._report_terms = report_terms
        _check_distinct([*self.sum_names, *(m.name for m in self.extremes)])
        self.weightings = self._distinct_weightings()
        self._evaluate: Callable[..., _Evaluation] = self._evaluate_terms
        if compile:
            self._evaluate = CompiledFunction(self._evaluate_terms, "loss_fn of LossAggregator")

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
        found = self._evaluate(output, microbatch, tuple(weights))
        # Coefficients stay out of what is compiled: a schedule changes them at every step.
        total = _weighted_total(found.partial_sums, coefficients)
        values = torch.cat([total.detach().to(found.values.dtype).view(1), found.values])
        return Sums(total, values, found.extremes)

    def _evaluate_terms(
        self, output: Any, microbatch: Mapping[str, Any], weights: Sequence[Tensor]
    ) -> _Evaluation:
        if self._prepare is not None:
            output = self._prepare(output, microbatch)
        weights_by = dict(zip(self.weightings, weights, strict=True))
        partial_sums: list[Tensor] = []
        metric_sums: dict[str, Tensor] = {}
        extremes: dict[str, Tensor] = {}
        metrics = {metric.name: metric for metric in self.metrics}
        for term, term_weighting in zip(self.terms, self._term_weightings, strict=True):
            term_weights = weights_by[term_weighting]
            losses, values = _losses_and_metrics(term, output, microbatch)
            check_token_losses(losses, term_weights, where=f" of term {term.name!r}")
            partial_sums.append(masked_weighted_sum(losses, term_weights))
            for name, value in values.items():
                check_token_losses(value, term_weights, where=f" as metric {name!r}")
                metric, value = metrics[name], value.detach()
                if metric.weighting is None:
                    extremes[name] = _extreme(value, term_weights, metric.normaliser)
                else:
                    weights_of_metric = weights_by[metric.weighting]
                    metric_sums[name] = masked_weighted_sum(value, weights_of_metric)
        reported = [
            *(partial_sums if self._report_terms else []),
            *(metric_sums[m.name] for m in self.sums),
        ]
        dtype = torch.float32
        for value in (*partial_sums, *reported):
            dtype = torch.promote_types(dtype, value.dtype)
        return _Evaluation(
            partial_sums,
            _stack([value.detach() for value in reported], dtype, weights[0].device),
            _stack([extremes[m.name] for m in self.extremes], dtype, weights[0].device),
        )


def _losses_and_metrics(
    term: LossTerm, output: Any, microbatch: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Tensor]]:
    """What the term's loss_fn gives; raises ValueError unless its metrics are the declared ones."""
    result = term.loss_fn(output, microbatch)
    losses, values = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if set(values) != set(term.metrics):
        raise ValueError(
            f"loss_fn of term {term.name!r} returned the metrics {sorted(values)}, but declared "
            f"are {sorted(term.metrics)}: return (losses, {{name: values}}) with these names."
        )
    return losses, values


def _stack(values: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One tensor [n], also of none."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.stack([value.to(dtype) for value in values])


def _weighted_total(partial_sums: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """Sum of c_k S_k; a term of coefficient 0 leaves it alone, even where it is NaN."""
    total = None
    for partial_sum, coefficient in zip(partial_sums, coefficients, strict=True):
        if coefficient != 0:
            part = partial_sum if coefficient == 1 else partial_sum * coefficient
            total = part if total is None else total + part
    if total is None:  # all are 0: a loss that still has a graph to run backward through
        [first, *_] = partial_sums
        total = torch.where(torch.zeros_like(first, dtype=torch.bool), first, 0.0)
    return total


def _extreme(value: Tensor, weights: Tensor, normaliser: str) -> Tensor:
    """The largest counted value, or minus the smallest; -inf if none counts."""
    signed = value if normaliser == "max" else -value
    lowest = torch.full((), -float("inf"), dtype=signed.dtype, device=signed.device)
    return torch.where(weights != 0, signed, lowest).max()


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
