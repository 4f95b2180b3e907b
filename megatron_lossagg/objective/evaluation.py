"""An objective on one microbatch: the weighted sums of its token losses, and of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_lossagg.objective.loss_fn_result import checked_result
from megatron_lossagg.objective.metric_values import partial_value
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.weighted_sum import masked_weighted_sum
from megatron_lossagg.weights.marks import valid_tokens


class PartialValue(NamedTuple):
    """A rank's and microbatch's part of a value of the global batch.

    Attributes:
        value: [], detached.
        kind: how parts are put together: "sum", "min" or "max".
    """

    value: Tensor
    kind: str


@dataclass(frozen=True)
class MicrobatchSums:
    """What one microbatch contributes on this rank; nothing is reduced over ranks.

    Attributes:
        total: sum_k c_k S_k, the part of the objective, shape [], with its graph.
        values: the total and, where terms are reported, S_k of each, detached, at least float32
            [num_values].
        metric_sums: of each metric that is a sum, over valid tokens, not divided, detached, float64
            [num_metric_sums]; None if there are none.
        extremes: maxima, and minima negated, -inf over no valid token, detached, [num_extremes];
            None if there are none.
    """

    total: Tensor
    values: Tensor
    metric_sums: Tensor | None
    extremes: Tensor | None

    def by_name(self, objective: Objective) -> dict[str, PartialValue]:
        """The parts of all values by the names that the objective gives them."""
        found = {
            name: PartialValue(value, "sum")
            for name, value in zip(objective.names.values, self.values.unbind(), strict=True)
        }
        if self.metric_sums is not None:
            sums = zip(objective.metric_sums, self.metric_sums.unbind(), strict=True)
            found |= {metric.name: PartialValue(value, metric.kind) for metric, value in sums}
        if self.extremes is not None:
            for metric, largest in zip(objective.extremes, self.extremes.unbind(), strict=True):
                value = largest if metric.kind == "max" else -largest
                found[metric.name] = PartialValue(value, metric.kind)
        return found


class Evaluate(Protocol):
    """Evaluates an objective on a microbatch: in plain Python, or compiled."""

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        rows_are_sequences: bool = True,
    ) -> MicrobatchSums:
        """The sums of a microbatch. No collective, no host sync on a device.

        Args:
            output: the model's, passed on to every `loss_fn`.
            microbatch: passed on, too; `cu_seqlens` in it tells that a row holds several sequences.
            weights: of each of the objective's weightings, [b, s] each.
            coefficients: c_k of each term.
            rows_are_sequences: whether a row holds whole sequences, not slices of them.

        Returns:
            The sums of this rank's part of a microbatch.
        """


class Evaluation:
    """Evaluates an objective J = sum_k c_k sum w_k l_k in plain Python.

    On the [b, s] tokens that are here, S_k = sum over w_k != 0 of w_k l_k. The sum of the totals
    sum_k c_k S_k over all microbatches and data- and context-parallel ranks is J, and their
    gradients add up to its gradient: nothing is divided by their number, nothing reduced over
    ranks.

    Args:
        objective: what is evaluated.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        # Now, as torch.compile cannot trace what is made when it is first asked for.
        self._kinds = {metric.name: metric.kind for metric in objective.metrics}
        self._names = objective.names

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        rows_are_sequences: bool = True,
    ) -> MicrobatchSums:
        """See `Evaluate`."""
        if self.objective.prepare is not None:
            output = self.objective.prepare(output, microbatch)
        partial_sums, metrics = self.terms(output, microbatch, weights, rows_are_sequences)
        return self.collected(total_of(partial_sums, coefficients), partial_sums, metrics)

    def terms(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        rows_are_sequences: bool,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """S_k of every term with its graph, and the metrics of all; of an output as prepared."""
        partial_sums: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for index in range(len(self.objective.terms)):
            partial_sum, of_term = self.term(index, output, microbatch, weights, rows_are_sequences)
            partial_sums.append(partial_sum)
            metrics |= of_term
        return partial_sums, metrics

    def term(
        self,
        index: int,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        rows_are_sequences: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """S_k of one term with its graph, and {metric: see `partial_value`}, detached."""
        term = self.objective.terms[index]
        term_weights = weights[self.objective.weighting_of_term[index]]
        losses, metrics = checked_result(
            term.loss_fn(output, microbatch),
            term,
            term_weights,
            where=f" of term {term.name!r}" if self.objective.reports_terms else "",
            rows_are_sequences=rows_are_sequences,
            is_packed=microbatch.get("cu_seqlens") is not None,
        )
        found = {}
        if metrics:
            is_valid = valid_tokens(term_weights)
            for name, values in metrics.items():
                found[name] = partial_value(values.detach(), is_valid, self._kinds[name])
        return masked_weighted_sum(losses, term_weights), found

    def collected(
        self, total: Tensor, partial_sums: Sequence[Tensor], metrics: Mapping[str, Tensor]
    ) -> MicrobatchSums:
        """The total, and copies of what is reported, without a graph, in the objective's order."""
        names = self._names
        values = [total.detach()]
        if self.objective.reports_terms:
            values += [partial_sum.detach() for partial_sum in partial_sums]
        return MicrobatchSums(
            total,
            _stacked(values),
            torch.stack([metrics[n] for n in names.metric_sums]) if names.metric_sums else None,
            _stacked([metrics[n] for n in names.extremes]) if names.extremes else None,
        )


def total_of(partial_sums: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """sum_k c_k S_k, []; a coefficient of 0 leaves its term out, even if that is NaN."""
    total = None
    for partial_sum, coefficient in zip(partial_sums, coefficients, strict=True):
        if coefficient != 0:
            part = partial_sum if coefficient == 1 else partial_sum * coefficient
            total = part if total is None else total + part
    if total is None:  # all are 0: a loss that still has a graph to run backward through
        [first, *_] = partial_sums
        total = torch.where(torch.zeros_like(first, dtype=torch.bool), first, 0.0)
    return total


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """In one dtype, at least float32."""
    dtype = torch.float32
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    return torch.stack([value.to(dtype) for value in values])
