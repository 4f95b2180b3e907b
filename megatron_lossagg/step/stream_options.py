"""The arguments of one call of `LossAggregator.wrap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_lossagg.step.planner import StepRequest
from megatron_lossagg.step.step import Step
from megatron_lossagg.weights.microbatch import Microbatch, NumMicrobatches


@dataclass(frozen=True)
class StreamOptions:
    """The arguments of one call of `LossAggregator.wrap`; see there."""

    num_microbatches: NumMicrobatches
    num_units: int | Callable[[], int] | None = None
    iteration: Callable[[], int] | None = None
    forward_only: bool = False
    pairs_by_tokens: bool | None = None

    def request(
        self,
        microbatches: Sequence[Microbatch] | None,
        num_microbatches: int,
        *,
        come_later: bool,
    ) -> StepRequest:
        """For the next step of the stream; without microbatches deferred, or of no data here."""
        is_given = microbatches is not None
        num_units = self.num_units() if is_given and callable(self.num_units) else self.num_units
        return StepRequest(
            num_microbatches=num_microbatches,
            microbatches=microbatches,
            come_later=come_later and not is_given,
            num_units=None if callable(num_units) else num_units,
            iteration=None if self.iteration is None else self.iteration(),
            forward_only=self.forward_only,
            pairs_by_tokens=self.pairs_by_tokens,
        )


# Plans a step of a stream from its microbatches, or from none where they are not known yet, and M.
PlanStep = Callable[[StreamOptions, Sequence[Microbatch] | None, int], Step]


def pairs_by_tokens(forward_only: bool, evaluation_average: str | None) -> bool | None:
    """Of an evaluated stream; None for one that is trained on, where the regime decides.

    Args:
        forward_only: of `LossAggregator.wrap`.
        evaluation_average: of `LossAggregator.wrap`.

    Returns:
        Whether reported pairs have numbers of tokens as denominators, or None.

    Raises:
        ValueError: an average that does not exist, or of a stream that is trained on.
    """
    if evaluation_average not in (None, "steps", "tokens"):
        raise ValueError(
            f"evaluation_average={evaluation_average!r} does not exist; expected 'steps' or "
            "'tokens'."
        )
    if forward_only:
        return evaluation_average == "tokens"
    if evaluation_average is not None:
        raise ValueError(
            "evaluation_average is for evaluated streams, whose reports a host adds up over "
            "several steps: pass forward_only=True with it."
        )
    return None
