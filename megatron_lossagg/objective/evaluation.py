"""Terms and metrics on one microbatch: losses and values of tokens, and their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.objective.terms import LossTerm
from megatron_lossagg.weighted_sum import check_token_losses, masked_weighted_sum
from megatron_lossagg.weights.marks import valid_tokens
from megatron_lossagg.weights.metrics import Metric, check_metric, extreme_of_metric, sum_of_metric
from megatron_lossagg.weights.weighting import Weighting


@dataclass(frozen=True)
class Sums:
    """What one microbatch contributes on this rank.

    Attributes:
        total: sum of c_k S_k, the part of the objective, shape [], with its graph.
        values: total and, where terms are reported, S_k of each, detached, [num_values].
        metric_sums: of each metric that is a sum, over valid tokens, not divided, detached, float64
            [num_metric_sums]; None if there are none.
        extremes: maxima (minima negated) of this microbatch, detached, [num_extremes]; None if
            none are reported.
    """

    total: Tensor
    values: Tensor
    metric_sums: Tensor | None
    extremes: Tensor | None

    @classmethod
    def of(
        cls, partial_sums: Sequence[Tensor], reported: Reported, coefficients: Sequence[float]
    ) -> Sums:
        """From S_k of every term; a coefficient of 0 leaves its term out, even if that is NaN."""
        total = None
        for partial_sum, coefficient in zip(partial_sums, coefficients, strict=True):
            if coefficient != 0:
                part = partial_sum if coefficient == 1 else partial_sum * coefficient
                total = part if total is None else total + part
        if total is None:  # all are 0: a loss that still has a graph to run backward through
            [first, *_] = partial_sums
            total = torch.where(torch.zeros_like(first, dtype=torch.bool), first, 0.0)
        return cls(total, *reported.with_total(total))


class TermSums(NamedTuple):
    """S_k of a term with its graph; its metrics' sums and extreme values by name."""

    partial_sum: Tensor
    sums: dict[str, Tensor]
    extremes: dict[str, Tensor]


class Reported(NamedTuple):
    """What is reported beside the total: S_k, sums and extremes of metrics, [] each, detached."""

    terms: list[Tensor]
    metric_sums: list[Tensor]
    extremes: list[Tensor]

    def with_total(self, total: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, metric sums and extremes as of `Sums`: copies without a graph."""
        metric_sums = torch.stack(self.metric_sums) if self.metric_sums else None
        extremes = _stacked(self.extremes) if self.extremes else None
        return _stacked([total.detach(), *self.terms]), metric_sums, extremes


class Evaluation:
    """Evaluates terms and their metrics. No collective, no host sync.

    Args:
        terms: of the objective.
        metrics: of all terms, in the order of the report.
        weightings: the distinct weightings, in the order in which their weights are passed.
        report_terms: whether S_k of every term is reported, too.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        metrics: Sequence[Metric],
        weightings: Sequence[Weighting],
        *,
        report_terms: bool,
    ) -> None:
        self._terms = tuple(terms)
        # Looked up once: a mode checks its options whenever a weighting is made.
        place = {weighting: index for index, weighting in enumerate(weightings)}
        self._place_of_term = tuple(place[term.weighting] for term in terms)
        self._sums = tuple(m.name for m in metrics if not m.is_extreme)
        self._extremes = tuple(m.name for m in metrics if m.is_extreme)
        self._report_terms = report_terms

    @property
    def num_terms(self) -> int:
        """How many terms there are."""
        return len(self._terms)

    def sums_of(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        rows_are_sequences: bool,
    ) -> Sums:
        """All terms and metrics on a microbatch."""
        return Sums.of(*self.of_all(output, microbatch, weights, rows_are_sequences), coefficients)

    def of_all(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        rows_are_sequences: bool = True,
    ) -> tuple[list[Tensor], Reported]:
        """S_k of every term with its graph, and what is reported."""
        found = [
            self.of_term(index, output, microbatch, weights, rows_are_sequences)
            for index in range(self.num_terms)
        ]
        return [sums.partial_sum for sums in found], self.reported(found)

    def of_term(
        self,
        index: int,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        rows_are_sequences: bool,
    ) -> TermSums:
        """Evaluate one term and its metrics."""
        term, term_weights = self._terms[index], weights[self._place_of_term[index]]
        where = f" of term {term.name!r}" if self._report_terms else ""
        losses, values = _losses_and_metrics(term, output, microbatch, where)
        check_token_losses(losses, term_weights, where=where)
        sums, extremes = {}, {}
        is_valid = valid_tokens(term_weights) if values else term_weights
        for name, value in values.items():
            normaliser = term.metrics[name]
            check_metric(
                value,
                term_weights,
                name,
                normaliser,
                rows_are_sequences=rows_are_sequences,
                is_packed=microbatch.get("cu_seqlens") is not None,
            )
            if name in self._sums:
                sums[name] = sum_of_metric(value.detach(), is_valid)
            else:
                extremes[name] = extreme_of_metric(value.detach(), is_valid, normaliser)
        return TermSums(masked_weighted_sum(losses, term_weights), sums, extremes)

    def reported(self, found: Sequence[TermSums]) -> Reported:
        """Put what the terms gave into the order of the report."""
        terms = [sums.partial_sum.detach() for sums in found] if self._report_terms else []
        sums = {name: value for of_term in found for name, value in of_term.sums.items()}
        extremes = {name: value for of_term in found for name, value in of_term.extremes.items()}
        return Reported(
            terms,
            [sums[name] for name in self._sums],
            [extremes[name] for name in self._extremes],
        )


def _losses_and_metrics(
    term: LossTerm, output: Any, microbatch: Mapping[str, Any], where: str
) -> tuple[Any, Mapping[str, Tensor]]:
    """What the term's loss_fn gives; raises ValueError unless its metrics are the declared ones."""
    result = term.loss_fn(output, microbatch)
    losses, values = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(values, Mapping) or set(values) != set(term.metrics):
        names = sorted(values) if isinstance(values, Mapping) else type(values).__name__
        raise ValueError(
            f"loss_fn{where} returned the metrics {names}, but declared are "
            f"{sorted(term.metrics)}: return (losses, {{name: values}}) with these names."
        )
    return losses, values


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """In one dtype, at least float32."""
    dtype = torch.float32
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    return torch.stack([value.to(dtype) for value in values])
