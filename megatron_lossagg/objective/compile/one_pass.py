"""`OnePass`: sums and the gradient of their total in one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_lossagg.objective.compile.compiler import backend_of_constants, compile_method
from megatron_lossagg.objective.evaluation import Evaluation, Sums, TermSums


class OnePass:
    """Evaluates an objective whose output is numbers per token, and its gradient beside the sums.

    A weighted sum is linear, so all that its backward pass can still bring is a factor: the
    gradient with respect to the output is written where the losses are.

    `loss_fn` gets views of the output: attributes of its tensors, their `.grad`, and whether one is
    (`is`) another are lost on it. A part of the output that no loss uses gets a gradient of zeros
    instead of None. Coefficients are inputs of the graph: a schedule of them compiles nothing.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._compiled = compile_method(self._with_gradients, backend_of_constants)
        self._coefficients: dict[tuple[tuple[float, ...], torch.device], tuple[Tensor, ...]] = {}

    @staticmethod
    def applies_to(output: Any, weights: Tensor) -> bool:
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
                and leaf.shape == weights.shape
                for leaf in leaves
            )
            and any(leaf.requires_grad for leaf in leaves)
        )

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[float, ...],
        rows_are_sequences: bool,
    ) -> Sums:
        """See `Evaluation.sums_of`. Raises if it cannot be compiled so.

        That is also where `loss_fn` uses tensors with gradients of their own, as of a parameter.
        """
        leaves = pytree.tree_leaves(output)
        # torch.func.grad turns these hooks off, and leaves them so where compiling it fails midway.
        without_hooks = torch.autograd.graph.disable_saved_tensors_hooks("compile=True is at work.")
        with torch.no_grad(), without_hooks:
            total, values, metric_sums, extremes, gradients, depends = self._compiled(
                pytree.tree_map(Tensor.detach, output),
                tuple(leaf.requires_grad for leaf in leaves),
                microbatch,
                weights,
                self._on_device(coefficients, weights[0].device),
                rows_are_sequences,
            )
        # Without a graph where plain Python gives none, so that a backward pass raises there, too.
        counted = [d for d, c in zip(depends, coefficients, strict=True) if c != 0] or depends[:1]
        if any(counted):
            differentiated = [leaf for leaf in leaves if leaf.requires_grad]
            total = _WithGradients.apply((total, gradients), *differentiated)
        return Sums(total, values, metric_sums, extremes)

    def _with_gradients(
        self,
        output: Any,
        is_needed: tuple[bool, ...],
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[Tensor, ...],
        rows_are_sequences: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, list[Tensor], list[bool]]:
        """The fields of `Sums`, the gradients that are needed of the total.

        And for every term whether it depends on the output at all.
        """
        leaves, structure = pytree.tree_flatten(output)
        inputs = [leaf for leaf, needed in zip(leaves, is_needed, strict=True) if needed]
        found: list[TermSums] = []
        parts: list[Tensor] = []
        gradients: list[list[Tensor]] = []
        depends: list[bool] = []
        for index, coefficient in enumerate(coefficients):

            def partial_sum(inputs: list[Tensor], index: int = index) -> tuple[Tensor, TermSums]:
                # As views: torch.compile takes the inputs of torch.func.grad themselves for tensors
                # without gradients, and traces an autograd.Function of them without its backward.
                given = iter([leaf.view_as(leaf) for leaf in inputs])
                by_leaf = zip(leaves, is_needed, strict=True)
                merged = [next(given) if needed else leaf for leaf, needed in by_leaf]
                output = pytree.tree_unflatten(merged, structure)
                sums = self._evaluation.of_term(
                    index, output, microbatch, weights, rows_are_sequences
                )
                depends.append(sums.partial_sum.requires_grad)
                return sums.partial_sum, sums

            gradient, (value, sums) = torch.func.grad_and_value(partial_sum, has_aux=True)(inputs)
            found.append(sums)
            parts.append(_times(coefficient, value))
            gradients.append([_times(coefficient, leaf) for leaf in gradient])
        total = torch.stack(parts).sum()
        values, metric_sums, extremes = self._evaluation.reported(found).with_total(total)
        of_total = [sum(of_terms[1:], of_terms[0]) for of_terms in zip(*gradients, strict=True)]
        return total, values, metric_sums, extremes, of_total, depends

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


def _times(coefficient: Tensor, value: Tensor) -> Tensor:
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
