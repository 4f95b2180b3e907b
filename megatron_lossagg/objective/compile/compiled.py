"""`CompiledSums`: terms, metrics and their sums through `torch.compile`, or as they are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.objective.compile.compiler import compile_method
from megatron_lossagg.objective.compile.one_pass import OnePass
from megatron_lossagg.objective.evaluation import Evaluation, Sums

_LOGGER = logging.getLogger(__name__)

Way = Callable[[Any, Mapping[str, Any], tuple[Tensor, ...], tuple[float, ...], bool], Sums]


class CompiledSums:
    """Evaluates an objective on a microbatch in compiled graphs, or as it is where that fails.

    Where the output is made of numbers per token (log-probabilities, entropies), one graph gives
    the sums and the gradient, see `OnePass`. Three cases go through a graph for each direction
    instead: any other output, such as logits; one that needs no gradient; and a `loss_fn` that uses
    tensors with gradients of their own, as of a parameter.

    A graph serves every number of rows and every width, except that torch makes another one for
    tensors of a single row and for small ones (up to 4096 elements). Nothing is compiled before the
    first call. What fails is left for good for the next simpler way, with the same numbers, and a
    warning tells where that is plain Python. So are more than 8 graphs, as of a Python float that
    `loss_fn` reads and that changes: keep it in a tensor.

    What torch.compile itself treats differently stays so: a 0-dimensional float64 tensor on the CPU
    that `loss_fn` changes in place, `ctx.mark_dirty` on the output, a collective on a tensor that
    is not detached. Numbers agree to rounding. On the CPU torch compiles expm1(x) as exp(x) - 1, so
    in float32 k3 of a small log ratio x is off by up to 6e-8, and by 6e-8 |x| uncompiled.

    Args:
        evaluation: of functions that `torch.compile(..., fullgraph=True)` can trace: no host sync,
            no branch on data.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._compiled = compile_method(evaluation.of_all)
        self._one_pass = OnePass(evaluation)
        self.ways: list[Way] = [self._one_pass, self.in_two_passes]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy compiles anew: graphs belong to the `loss_fn` that they were made of."""
        return CompiledSums, (self._evaluation,)

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: tuple[Tensor, ...],
        coefficients: tuple[float, ...],
        rows_are_sequences: bool,
    ) -> Sums:
        """See `Evaluation.sums_of`. A fault of a `loss_fn` itself is raised as it is."""
        arguments = (output, microbatch, weights, coefficients, rows_are_sequences)
        failures: list[tuple[Way, Exception]] = []
        for way in self.ways:
            if way is self._one_pass and not OnePass.applies_to(output, weights[0]):
                continue
            try:
                sums = way(*arguments)
                break
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                failures.append((way, error))
        else:
            sums = self._evaluation.sums_of(*arguments)
        # Only now, as they were faults of compiling: what runs in no way does not get here.
        for way, reason in failures:
            # A new list, as other threads may go over the old one.
            remaining = self.ways
            if way in remaining:
                self.ways = remaining[remaining.index(way) + 1 :]
            _LOGGER.info("%s cannot evaluate the loss: %s", way, reason)
        if failures and not self.ways:
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
        rows_are_sequences: bool,
    ) -> Sums:
        """A graph forward and, made by torch, one backward."""
        partial_sums, reported = self._compiled(output, microbatch, weights, rows_are_sequences)
        return Sums.of(partial_sums, reported, coefficients)
