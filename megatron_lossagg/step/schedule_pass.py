"""`SchedulePass`: one run of the schedule over a step, as it is seen from inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lossagg.step.microbatch_report import MicrobatchReport


@dataclass
class TakenCount:
    """How many microbatches one data iterator has handed out."""

    value: int = 0


@dataclass
class SchedulePass:
    """What one run of the schedule did with a step; a step that runs again begins another one.

    Attributes:
        taken: what each data iterator that was handed out has yielded.
        num_loss_calls: calls of `loss_func`.
        weight_sums: per call, the sums of the weights that it saw, float64 [num_weightings].
        returned: per call, the sums of which S comes first, and an alias of the tensor that was
            returned, S times the contract's factor, which the schedule rescales in place.
        num_tokens: what each call returned as its number of tokens (R3).
        reports: what each call reported.
        tokens_seen: without a plan, above 0 if a call saw a valid token; see `Totals`.
        coarsest_eps: the largest machine epsilon among the weights' dtypes.
        is_validated: whether `validate` has looked at it.
    """

    taken: list[TakenCount] = field(default_factory=list)
    num_loss_calls: int = 0
    weight_sums: list[Tensor] = field(default_factory=list)
    returned: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_tokens: list[Tensor] = field(default_factory=list)
    reports: list[MicrobatchReport] = field(default_factory=list)
    tokens_seen: Tensor | None = None
    coarsest_eps: float = 0.0
    is_validated: bool = False

    def add_iterator(self) -> TakenCount:
        """Register one more data iterator; it counts there what it hands out."""
        self.taken.append(TakenCount())
        return self.taken[-1]

    def see_tokens(self, num_tokens: Tensor) -> None:
        """Note valid tokens of a call; no value is read."""
        before = self.tokens_seen
        self.tokens_seen = num_tokens if before is None else before + num_tokens.to(before.device)

    def add_loss_call(self, weights: Sequence[Tensor]) -> None:
        """Note a call of `loss_func`; no value is read."""
        self.num_loss_calls += 1
        sums = [w.sum(dtype=torch.float64) for w in weights]
        self.weight_sums.append(torch.stack(sums) if len(sums) > 1 else sums[0].view(1))
        for w in weights:
            self.coarsest_eps = max(self.coarsest_eps, torch.finfo(w.dtype).eps)
