"""`CompiledSums`: terms, metrics and their sums through `torch.compile`, gradients included."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_lossagg.evaluation import Evaluation, Sums, TermSums

BACKEND: Any = "inductor"
_LOGGER = logging.getLogger(__name__)

Way = Callable[[Any, Mapping[str, Any], tuple[Tensor, ...], tuple[float, ...]], Sums]


class CompiledSums:
    """Evaluates an objective on a microbatch in compiled graphs, or as it is where that fails.

    Where the output is made of numbers per token (log-probabilities, entropies: float32 or float64,
    of the shape of the weights), one graph gives the sums and the gradient with respect to the
    output in one pass over the tokens: a weighted sum is linear, so all that its backward pass can
    still bring is a factor. Three cases go through a graph for each direction instead: any other
    output, such as logits, whose gradient should not exist before the backward pass; one that needs
    no gradient; and a `loss_fn` that uses tensors with gradients of their own, as of a parameter.

    A graph serves every number of rows and every width, except that torch makes another one for
    tensors of a single row and for small ones (up to 4096 elements). In one pass coefficients are
    inputs of the graph, in two they stay outside: a schedule of them compiles nothing. Nothing is
    compiled before the first call. What fails is left for good for the next simpler way, with the
    same numbers, and a warning tells where that is plain Python. So are more than 8 graphs, as of a
    Python float that `loss_fn` reads and that changes: keep it in a tensor.

    In one pass `loss_fn` gets views of the output: attributes of its tensors, their `.grad`, and
    whether one is (`is`) another are lost on it. A part of the output that no loss uses gets a
    gradient of zeros instead of None. What torch.compile itself treats differently stays so: a
    0-dimensional float64 tensor on the CPU that `loss_fn` changes in place, `ctx.mark_dirty` on the
    output, a collective on a tensor that is not detached.

    Numbers agree to rounding. On the CPU torch compiles expm1(x) as exp(x) - 1, so in float32 k3 of
    a small log ratio x is off by up to 6e-8, and by 6e-8 |x| uncompiled.

    Args:
        evaluation: of functions that `torch.compile(..., fullgraph=True)` can trace: no host sync,
            no branch on data.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._compiled = _compile(evaluation.of_all)
        self._compiled_with_gradients = _compile(self._with_gradients, _without_other_gradients)
        self._coefficients: dict[tuple[tuple[float, ...], torch.device], tuple[Tensor, ...]] = {}
        self.compiled_ways: list[Way] = [self.in_one_pass, self.in_two_passes]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy compiles anew: graphs belong to the `loss_fn` that they were made of."""
        return CompiledSums, (self._evaluation,)

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[float, ...],
    ) -> Sums:
        """See `Evaluation.sums_of`. A fault of a `loss_fn` itself is raised as it is."""
        arguments = (output, microbatch, weights, coefficients)
        failures: list[tuple[Way, Exception]] = []
        for way in self.compiled_ways:
            if way == self.in_one_pass and not _is_differentiated_per_token(output, weights[0]):
                continue
            try:
                sums = way(*arguments)
                break
            except Exception as error:
                failures.append((way, error))
        else:
            sums = self._evaluation.sums_of(*arguments)
        # Only now, as they were faults of compiling: what runs in no way does not get here.
        for way, reason in failures:
            # A new list, as other threads may go over the old one.
            remaining = self.compiled_ways
            if way in remaining:
                self.compiled_ways = remaining[remaining.index(way) + 1 :]
            _LOGGER.info("Evaluating the loss %s does not work: %s", way.__name__, reason)
        if failures and not self.compiled_ways:
            reason = failures[-1][1]
            text = " ".join(str(reason).split())[:200]
            warnings.warn(
                "loss_fn of LossAggregator could not be compiled and runs uncompiled from here on, "
                f"with the same numbers. {type(reason).__name__}: {text}",
                RuntimeWarning,
                stacklevel=2,
            )
        return sums

    def in_two_passes(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[float, ...],
    ) -> Sums:
        """A graph forward and, made by torch, one backward."""
        partial_sums, reported = self._compiled(output, microbatch, weights)
        return Sums.of(partial_sums, reported, coefficients)

    def in_one_pass(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[float, ...],
    ) -> Sums:
        """One graph, whose gradients the backward pass multiplies by what comes from above."""
        leaves = pytree.tree_leaves(output)
        # torch.func.grad turns these hooks off, and leaves them so where compiling it fails midway.
        without_hooks = torch.autograd.graph.disable_saved_tensors_hooks("compile=True is at work.")
        with torch.no_grad(), without_hooks:
            total, values, extremes, gradients, depends = self._compiled_with_gradients(
                pytree.tree_map(Tensor.detach, output),
                tuple(leaf.requires_grad for leaf in leaves),
                microbatch,
                weights,
                self._on_device(coefficients, weights[0].device),
            )
        # Without a graph where plain Python gives none, so that a backward pass raises there, too.
        counted = [d for d, c in zip(depends, coefficients, strict=True) if c != 0] or depends[:1]
        if any(counted):
            differentiated = [leaf for leaf in leaves if leaf.requires_grad]
            total = _WithGradients.apply((total, gradients), *differentiated)
        return Sums(total, values, extremes)

    def _with_gradients(
        self,
        output: Any,
        is_needed: tuple[bool, ...],
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[bool]]:
        """Total, values and extremes as of `Sums`, the gradients that are needed of the total.

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
                sums = self._evaluation.of_term(index, output, microbatch, weights)
                depends.append(sums.partial_sum.requires_grad)
                return sums.partial_sum, sums

            gradient, (value, sums) = torch.func.grad_and_value(partial_sum, has_aux=True)(inputs)
            found.append(sums)
            parts.append(_times(coefficient, value))
            gradients.append([_times(coefficient, leaf) for leaf in gradient])
        total = torch.stack(parts).sum()
        reported = self._evaluation.reported(found, weights[0].device)
        of_total = [sum(of_terms[1:], of_terms[0]) for of_terms in zip(*gradients, strict=True)]
        return total, reported.with_total(total), reported.extremes, of_total, depends

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
            found = tuple(on_device(c) for c in coefficients)
            self._coefficients = {key: found}
        return found


def _times(coefficient: Tensor, value: Tensor) -> Tensor:
    """Their product in the value's dtype; 0 if the coefficient is, even where the value is NaN."""
    coefficient = coefficient.to(value.dtype).view(())
    return torch.where(coefficient != 0, value * coefficient, torch.zeros_like(value))


def _is_differentiated_per_token(output: Any, weights: Tensor) -> bool:
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


def _compile(method: Any, backend: Any = None) -> Callable[..., Any]:
    # torch counts graphs per code object and stops at 8, so every aggregator gets its own.
    function = method.__func__
    code, name = function.__code__.replace(), function.__name__
    copied = FunctionType(code, function.__globals__, name, function.__defaults__)
    return torch.compile(
        MethodType(copied, method.__self__),
        dynamic=True,
        fullgraph=True,
        backend=backend or BACKEND,
    )


def _without_other_gradients(graph: Any, inputs: Sequence[Any]) -> Any:
    """The backend, unless an input needs a gradient: the output is given without, so it is another.

    torch guards on this, too: should an input come to need one later, it compiles anew.
    """
    if any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        raise TypeError("loss_fn uses a tensor that needs a gradient and is not the output.")
    return torch._dynamo.lookup_backend(BACKEND)(graph, list(inputs))
