"""What `loss_func` reports of one microbatch, for a host that sums pairs and for `report`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lossagg.groups import all_reduce_extremes, communication_device
from megatron_lossagg.objective.evaluation import MicrobatchSums
from megatron_lossagg.objective.objective import ValueNames
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.step.report import extreme_values


class MicrobatchReport(dict[str, Tensor]):
    """name -> [numerator, denominator], shape [2], of the loss, its terms and metrics.

    A host such as Megatron-LM's train_step sums each over microbatches and dp x cp ranks and
    divides once. The pairs are views of `packed`. Minima and maxima are no quotients of sums: they
    are not among the entries. Arguments are attributes, too.

    Args:
        names: what the rows stand for.
        packed: pairs of values, then of metric sums, [num_values + num_metric_sums, 2].
        metric_sums: sums over valid tokens, not divided, float64 [num_metric_sums], or None.
        extremes: maxima, and minima negated, of this microbatch, [num_extremes], or None.
        extreme_pairs: float64 [num_extremes, 2], or None: pairs whose sums have the minimum or
            maximum of the global batch as quotient once `Step.validate` has run, and NaN before.
        has_shares: whether all denominators are shares, which sum to 1.
    """

    def __init__(
        self,
        names: ValueNames,
        packed: Tensor,
        metric_sums: Tensor | None,
        extremes: Tensor | None,
        extreme_pairs: Tensor | None,
        has_shares: bool,
    ) -> None:
        super().__init__(zip((*names.values, *names.metric_sums), packed.unbind(), strict=True))
        self.names = names
        self.packed = packed
        self.metric_sums = metric_sums
        self.extremes = extremes
        self.extreme_pairs = extreme_pairs
        self.has_shares = has_shares

    def renamed(self, names: ValueNames) -> MicrobatchReport:
        """The same tensors under other names."""
        return MicrobatchReport(
            names,
            self.packed,
            self.metric_sums,
            self.extremes,
            self.extreme_pairs,
            self.has_shares,
        )

    def add_extremes(self) -> None:
        """Make pairs of minima and maxima entries, for a host that looks after `validate`."""
        if self.extreme_pairs is not None:
            self.update(zip(self.names.extremes, self.extreme_pairs.unbind(), strict=True))

    def divide_shares(self) -> None:
        """Make denominators that are shares 1, in place: [S M D C, 1] instead of [S, 1/(M D C)].

        For a host that averages quotients of microbatches, or clamps denominators. Denominators
        that are numbers of tokens stay.
        """
        if self.has_shares:
            self.packed /= self.packed[:, 1:].clone()

    def multiply_values(self, factor: float) -> None:
        """Multiply the loss and its terms in place, as gradients were when they were finalized."""
        self.packed[: len(self.names.values), 0] *= factor

    def divide_by_share(self, share: float) -> None:
        """Make the denominators of the loss and its terms `share`, in place."""
        self.packed[: len(self.names.values), 1] = share

    def divide_metrics(self, divisors: Tensor, share: float) -> None:
        """Divide metric sums by counts that were not known before, in place."""
        if self.metric_sums is not None:
            pairs = self.packed[len(self.names.values) :]
            pairs[:, 0] = self.metric_sums / divisors.to(pairs.device)
            pairs[:, 1] = share

    def set_extremes(self, extremes: Sequence[float], share: float) -> None:
        """Take over the minima and maxima of the global batch, in place."""
        if self.extreme_pairs is not None:
            for row, value in zip(self.extreme_pairs, extremes, strict=True):
                row[0] = value * share


def microbatch_report(
    sums: MicrobatchSums,
    names: ValueNames,
    *,
    num_tokens: Tensor | None,
    share: float,
    copies: int,
    divisors: Tensor | None,
    metric_denominators: Sequence[Tensor | float],
) -> MicrobatchReport:
    """The report of a microbatch. Neither communicates nor syncs.

    Args:
        sums: what the microbatch contributes on this rank.
        names: of the entries.
        num_tokens: n, [], where pairs of values have it as denominator; None: they have `share`.
        share: 1 / (microbatches x dp x cp ranks), which sums to 1.
        copies: on how many context-parallel ranks each token's value is present.
        divisors: what metric sums are divided by, float64 [num_metric_sums]; None: not known here.
        metric_denominators: without divisors, what this microbatch adds to each metric's
            denominator; NaN if that is not known.

    Returns:
        The report.
    """
    values = sums.values if copies == 1 else sums.values / copies
    if num_tokens is None:
        denominators = torch.full_like(values, share)
    else:
        denominators = num_tokens.to(values.dtype).expand_as(values)
    packed = torch.stack([values, denominators], dim=1)
    metric_sums = sums.metric_sums
    if metric_sums is not None:
        metric_sums = metric_sums if copies == 1 else metric_sums / copies
        if divisors is not None:
            numerators = metric_sums / divisors.to(metric_sums.device, non_blocking=True)
            shares = torch.full_like(numerators, share)
        else:
            numerators, shares = metric_sums, torch.empty_like(metric_sums)
            for row, denominator in enumerate(metric_denominators):
                shares[row] = denominator
        packed = torch.cat([packed, torch.stack([numerators, shares], dim=1)])
    extreme_pairs = None
    if sums.extremes is not None:
        extreme_pairs = torch.full(
            (len(names.extremes), 2), share, dtype=torch.float64, device=values.device
        )
        extreme_pairs[:, 0] = float("nan")
    has_shares = num_tokens is None and (metric_sums is None or divisors is not None)
    return MicrobatchReport(names, packed, metric_sums, sums.extremes, extreme_pairs, has_shares)


def divide_reports(
    reports: Sequence[MicrobatchReport],
    gradient_factor: float,
    divisors: Tensor | None,
    share: float,
) -> None:
    """Divide reports by counts that came with final gradients, in place.

    Args:
        reports: of this rank's microbatches.
        gradient_factor: what gradients were multiplied by.
        divisors: of metric sums, float64 [number of them]; None if there are none.
        share: 1 / (microbatches x dp x cp ranks).
    """
    for report in reports:
        report.multiply_values(gradient_factor)
        if divisors is not None:
            report.divide_metrics(divisors, share)


def complete_reports(
    reports: Sequence[MicrobatchReport],
    num_tokens: float,
    context: StepContext,
) -> None:
    """Complete reports that a host sums up, in place: an all-reduce over dp x cp of extremes.

    Minima and maxima of the global batch, and the value 0 where there is no token. Every rank of
    the last stage calls it.

    Args:
        reports: of this rank's microbatches.
        num_tokens: n of the global batch, where pairs have it as denominators.
        context: of the step.
    """
    share = context.share
    if context.pairs_by_tokens and num_tokens == 0:
        for report in reports:
            report.divide_by_share(share)
    if not context.objective.extremes or not context.sees_weights:
        return
    found = [report.extremes.double() for report in reports if report.extremes is not None]
    largest = torch.full((len(context.objective.extremes),), -torch.inf, dtype=torch.float64)
    if found:
        largest = torch.stack(found).max(dim=0).values
    largest = largest.to(communication_device(context.groups.dp_cp, largest.device))
    largest = all_reduce_extremes(largest, context.groups.dp_cp)
    values = extreme_values(context.objective.extremes, largest.tolist())
    for report in reports:
        report.set_extremes(values, share)
