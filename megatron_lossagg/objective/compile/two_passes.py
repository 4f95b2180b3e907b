"""`TwoPasses`: a compiled graph of the sums and, made by torch, one of their gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_lossagg.objective.compile.compiler import compile_method
from megatron_lossagg.objective.evaluation import Evaluation, MicrobatchSums, total_of


class TwoPasses:
    """Evaluates an objective on any output, which may need a gradient or not.

    Args:
        plain: evaluates an objective that prepares nothing.
    """

    def __init__(self, plain: Evaluation) -> None:
        self._plain = plain
        self._terms = compile_method(plain.terms)

    @staticmethod
    def applies_to(output: Any, weights: Sequence[Tensor]) -> bool:
        """Always."""
        return True

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        rows_are_sequences: bool = True,
    ) -> MicrobatchSums:
        """See `Evaluate`. Coefficients stay outside: a graph would hold those of its first step."""
        partial_sums, metrics = self._terms(output, microbatch, weights, rows_are_sequences)
        return self._plain.collected(total_of(partial_sums, coefficients), partial_sums, metrics)
