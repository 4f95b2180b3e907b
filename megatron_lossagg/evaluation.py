"""Terms and metrics on one microbatch: losses and values of tokens, and their weighted sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.loss import check_token_losses, masked_weighted_sum
from megatron_lossagg.terms import LossTerm, Weighting


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
        extremes: maxima (minima negated) of this microbatch, detached, [num_extremes]; None if
            none are reported.
    """

    total: Tensor
    values: Tensor
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
    """What is reported beside the total: sums and extreme values, shape [] each, detached."""

    sums: list[Tensor]
    extremes: list[Tensor]

    def with_total(self, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values and extremes as of `Sums`: copies without a graph, in at least float32."""
        values = [total.detach(), *self.sums]
        dtype = torch.float32
        for value in values:
            dtype = torch.promote_types(dtype, value.dtype)
        return _stack(values, dtype), _stack(self.extremes, dtype) if self.extremes else None


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
        self._sums = tuple(m.name for m in metrics if m.weighting is not None)
        self._extremes = tuple(m.name for m in metrics if m.weighting is None)
        self._place_of_metric = {m.name: place[m.weighting] for m in metrics if m.weighting}
        self._normaliser = {m.name: m.normaliser for m in metrics}
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
    ) -> Sums:
        """All terms and metrics on a microbatch."""
        return Sums.of(*self.of_all(output, microbatch, weights), coefficients)

    def of_all(
        self, output: Any, microbatch: Mapping[str, Any], weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], Reported]:
        """S_k of every term with its graph, and what is reported."""
        found = [self.of_term(i, output, microbatch, weights) for i in range(self.num_terms)]
        return [sums.partial_sum for sums in found], self.reported(found)

    def of_term(
        self,
        index: int,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
    ) -> TermSums:
        """Evaluate one term and its metrics."""
        term, term_weights = self._terms[index], weights[self._place_of_term[index]]
        losses, values = _losses_and_metrics(term, output, microbatch)
        check_token_losses(losses, term_weights, where=f" of term {term.name!r}")
        sums, extremes = {}, {}
        for name, value in values.items():
            check_token_losses(value, term_weights, where=f" as metric {name!r}")
            value = value.detach()
            if name in self._place_of_metric:
                sums[name] = masked_weighted_sum(value, weights[self._place_of_metric[name]])
            else:
                extremes[name] = _extreme(value, term_weights, self._normaliser[name])
        return TermSums(masked_weighted_sum(losses, term_weights), sums, extremes)

    def reported(self, found: Sequence[TermSums]) -> Reported:
        """Put what the terms gave into the order of the report."""
        sums = [sums.partial_sum.detach() for sums in found] if self._report_terms else []
        by_name = {name: value for of_term in found for name, value in of_term.sums.items()}
        sums += [by_name[name] for name in self._sums]
        by_name = {name: value for of_term in found for name, value in of_term.extremes.items()}
        return Reported(sums, [by_name[name] for name in self._extremes])


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


def _stack(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([value.to(dtype) for value in values])


def _extreme(value: Tensor, weights: Tensor, normaliser: str) -> Tensor:
    """The largest counted value, or minus the smallest; -inf if none counts."""
    signed = value if normaliser == "max" else -value
    lowest = torch.full((), -float("inf"), dtype=signed.dtype, device=signed.device)
    if signed.numel() == 0:
        return lowest
    return torch.where(weights != 0, signed, lowest).max()
