"""`OnePass`: sums and the gradient of their total in one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_lossagg.objective.compile.compiler import backend_of_constants, compile_method
from megatron_lossagg.objective.evaluation import Evaluation, MicrobatchSums


class OnePass:
    """Evaluates an objective whose output is numbers per token, and its gradient beside the sums.

    A weighted sum is linear, so all that its backward pass can still bring is a factor: the
    gradient with respect to the output is written where the losses are.

    `loss_fn` gets views of the output: attributes of its tensors, their `.grad`, and whether one is
    (`is`) another are lost on it. A part of the output that no loss uses gets a gradient of zeros
    instead of None. Coefficients are inputs of the graph: a schedule of them compiles nothing.

    Args:
        plain: evaluates an objective that prepares nothing.
    """

    def __init__(self, plain: Evaluation) -> None:
        self._plain = plain
        self._with_gradients = compile_method(self._evaluate_with_gradients, backend_of_constants)
        self._coefficients: dict[tuple[tuple[float, ...], torch.device], tuple[Tensor, ...]] = {}

    @staticmethod
    def applies_to(output: Any, weights: Sequence[Tensor]) -> bool:
        """Whether it is float32 or float64 of the shape of the weights, and to be differentiated.

        The gradient of logits should not exist before the backward pass, and one in lower precision
        not before it is multiplied by a loss scale.
        """
        leaves = pytree.tree_leaves(output)
        return (
            torch.is_grad_enabled()
            and all(
                isinstance(leaf, Tensor)
                and leaf.dtype in (torch.float32, torch.float64)
                and leaf.shape == weights[0].shape
                for leaf in leaves
            )
            and any(leaf.requires_grad for leaf in leaves)
        )

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        rows_are_sequences: bool = True,
    ) -> MicrobatchSums:
        """See `Evaluate`. Raises if it cannot be compiled so.

        That is also where `loss_fn` uses tensors with gradients of their own, as of a parameter.
        """
        leaves = pytree.tree_leaves(output)
        # torch.func.grad turns these hooks off, and leaves them so where compiling it fails midway.
        without_hooks = torch.autograd.graph.disable_saved_tensors_hooks("compile=True is at work.")
        with torch.no_grad(), without_hooks:
            total, sums, gradients, depends = self._with_gradients(
                pytree.tree_map(Tensor.detach, output),
                tuple(leaf.requires_grad for leaf in leaves),
                microbatch,
                weights,
                self._on_device(tuple(coefficients), weights[0].device),
                rows_are_sequences,
            )
        # Without a graph where plain Python gives none, so that a backward pass raises there, too.
        counted = [d for d, c in zip(depends, coefficients, strict=True) if c != 0] or depends[:1]
        if any(counted):
            differentiated = [leaf for leaf in leaves if leaf.requires_grad]
            total = _WithGradients.apply((total, gradients), *differentiated)
        return MicrobatchSums(total, *sums)

    def _evaluate_with_gradients(
        self,
        output: Any,
        is_needed: tuple[bool, ...],
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: tuple[Tensor, ...],
        rows_are_sequences: bool,
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None], list[Tensor], list[bool]]:
        """What is compiled: plain tensors in, plain tensors out.

        Returns:
            (total, (values, metric_sums, extremes) of `MicrobatchSums`, the gradients of the total
            that are needed, for every term whether it depends on the output at all).
        """
        terms = [
            self._term(index, output, is_needed, microbatch, weights, rows_are_sequences)
            for index in range(len(coefficients))
        ]
        parts = [
            _multiplied(c, term.partial_sum) for c, term in zip(coefficients, terms, strict=True)
        ]
        total = torch.stack(parts).sum()
        gradients = [
            [_multiplied(c, gradient) for gradient in term.gradients]
            for c, term in zip(coefficients, terms, strict=True)
        ]
        of_total = [sum(of_terms[1:], of_terms[0]) for of_terms in zip(*gradients, strict=True)]
        metrics = {name: value for term in terms for name, value in term.metrics.items()}
        sums = self._plain.collected(total, [term.partial_sum for term in terms], metrics)
        packed = (sums.values, sums.metric_sums, sums.extremes)
        return total, packed, of_total, [term.depends for term in terms]

    def _term(
        self,
        index: int,
        output: Any,
        is_needed: tuple[bool, ...],
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        rows_are_sequences: bool,
    ) -> _Term:
        """One term and its gradients with respect to the leaves of the output that need one."""
        leaves, structure = pytree.tree_flatten(output)
        depends: list[bool] = []

        def partial_sum(inputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            # As views: torch.compile takes the inputs of torch.func.grad themselves for tensors
            # without gradients, and traces an autograd.Function of them without its backward.
            views = iter([leaf.view_as(leaf) for leaf in inputs])
            by_leaf = zip(leaves, is_needed, strict=True)
            merged = [next(views) if needed else leaf for leaf, needed in by_leaf]
            own_output = pytree.tree_unflatten(merged, structure)
            value, metrics = self._plain.term(
                index, own_output, microbatch, weights, rows_are_sequences
            )
            depends.append(value.requires_grad)
            return value, metrics

        inputs = [leaf for leaf, needed in zip(leaves, is_needed, strict=True) if needed]
        of_inputs, (value, metrics) = torch.func.grad_and_value(partial_sum, has_aux=True)(inputs)
        return _Term(value, metrics, of_inputs, depends[0])

    def _on_device(
        self, coefficients: tuple[float, ...], device: torch.device
    ) -> tuple[Tensor, ...]:
        """float64 [1] each, written by kernels: a copy from the host would wait.

        Not [K]: torch takes equal sizes for one, so a microbatch of K rows would fix their number.
        Not []: torch then compiles twice, in search of a Python number.
        """
        key = (coefficients, device)
        found = self._coefficients.get(key)  # another thread may replace the dict
        if found is None:
            on_device = partial(torch.full, (1,), dtype=torch.float64, device=device)
            with torch.inference_mode(False):  # made while evaluating, used while training
                found = tuple(on_device(c) for c in coefficients)
            self._coefficients = {key: found}
        return found


class _Term(NamedTuple):
    """S_k of a term, the values of its metrics, dS_k by output, and whether it depends on that."""

    partial_sum: Tensor
    metrics: dict[str, Tensor]
    gradients: list[Tensor]
    depends: bool


def _multiplied(coefficient: Tensor, value: Tensor) -> Tensor:
    """Their product in the value's dtype; 0 if the coefficient is, even where the value is NaN."""
    coefficient = coefficient.to(value.dtype).view(())
    return torch.where(coefficient != 0, value * coefficient, torch.zeros_like(value))


class _WithGradients(torch.autograd.Function):
    """A value whose gradients with respect to the inputs are known."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, Sequence[Tensor]], *inputs: Tensor) -> Tensor:
        """`known` is (value, its gradient for every input)."""
        value, gradients = known
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients times that of the value; not in place, as there may be a second pass."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A loss with compile=True has no second derivatives (create_graph=True). Build the "
                "LossAggregator without compile for them."
            )
        return (None, *(upstream * gradient for gradient in ctx.saved_tensors))
