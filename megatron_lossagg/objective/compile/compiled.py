"""`CompiledEvaluation`: an objective through `torch.compile`, or plainly where that fails."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.objective.compile.one_pass import OnePass
from megatron_lossagg.objective.compile.two_passes import TwoPasses
from megatron_lossagg.objective.evaluation import Evaluate, Evaluation, MicrobatchSums
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.typed_fields import check_flags

_LOGGER = logging.getLogger(__name__)


def make_evaluation(objective: Objective, *, compile: bool) -> Evaluate:
    """What evaluates an objective. Raises TypeError unless `compile` is a bool."""
    check_flags(compile=compile)
    return CompiledEvaluation(objective) if compile else Evaluation(objective)


class CompiledEvaluation:
    """Evaluates an objective on a microbatch in compiled graphs, or plainly where that fails.

    Where the output is made of numbers per token (log-probabilities, entropies), one graph gives
    the sums and the gradient, see `OnePass`. Three cases go through a graph for each direction
    instead, see `TwoPasses`: any other output, such as logits; one that needs no gradient; and a
    `loss_fn` that uses tensors with gradients of their own, as of a parameter. What prepares the
    output for all terms stays outside of graphs.

    A graph serves every number of rows and every width, except that torch makes another one for
    tensors of a single row and for small ones (up to 4096 elements). Nothing is compiled before the
    first call. What fails is left for good for what is simpler, with the same numbers, and a
    warning tells where that is plain Python. So are more than 8 graphs, as of a Python float that
    `loss_fn` reads and that changes: keep it in a tensor.

    What torch.compile itself treats differently stays so: a 0-dimensional float64 tensor on the CPU
    that `loss_fn` changes in place, `ctx.mark_dirty` on the output, a collective on a tensor that
    is not detached. Numbers agree to rounding. On the CPU torch compiles expm1(x) as exp(x) - 1, so
    in float32 k3 of a small log ratio x is off by up to 6e-8, and by 6e-8 |x| uncompiled.

    Args:
        objective: of functions that `torch.compile(..., fullgraph=True)` can trace: no host sync,
            no branch on data.

    Attributes:
        objective: what is evaluated.
        remaining: what has not failed so far, the fastest first.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._plain = Evaluation(replace(objective, prepare=None))
        self.remaining: tuple[OnePass | TwoPasses, ...] = (
            OnePass(self._plain),
            TwoPasses(self._plain),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy compiles anew: graphs belong to the `loss_fn` that they were made of."""
        return CompiledEvaluation, (self.objective,)

    def __call__(
        self,
        output: Any,
        microbatch: Mapping[str, Any],
        weights: Sequence[Tensor],
        coefficients: Sequence[float],
        rows_are_sequences: bool = True,
    ) -> MicrobatchSums:
        """See `Evaluate`. A fault of a `loss_fn` itself is raised as it is."""
        if self.objective.prepare is not None:
            output = self.objective.prepare(output, microbatch)
        weights, coefficients = tuple(weights), tuple(coefficients)
        arguments = (output, microbatch, weights, coefficients, rows_are_sequences)
        failures: list[tuple[OnePass | TwoPasses, Exception]] = []
        for compiled in self.remaining:
            if not compiled.applies_to(output, weights):
                continue
            try:
                sums = compiled(*arguments)
                break
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                failures.append((compiled, error))
        else:
            sums = self._plain(*arguments)
        # Only now, as they were faults of compiling: a fault of a loss_fn does not get here.
        if failures:
            self._leave(failures)
        return sums

    def _leave(self, failures: Sequence[tuple[OnePass | TwoPasses, Exception]]) -> None:
        """Try no more what failed, nor what comes before it; warn if nothing remains."""
        for failed, reason in failures:
            remaining = self.remaining  # another thread may replace it
            if failed in remaining:
                self.remaining = remaining[remaining.index(failed) + 1 :]
            _LOGGER.info("%s cannot evaluate the loss: %s", type(failed).__name__, reason)
        if not self.remaining:
            _, reason = failures[-1]
            text = " ".join(str(reason).split())[:200]
            warnings.warn(
                "loss_fn of LossAggregator could not be compiled and runs uncompiled from here on, "
                f"with the same numbers. {type(reason).__name__}: {text}",
                RuntimeWarning,
                stacklevel=3,
            )
