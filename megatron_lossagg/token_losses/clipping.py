"""PPO's clipping, done on the log ratio before `exp`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lossagg.token_losses.masking import check_option


def log_bounds(clip_low: float, clip_high: float) -> tuple[float, float]:
    """(log(1 - clip_low), log(1 + clip_high)); a clip_low from 1 on is no bound, as is inf."""
    check_option("clip_low", clip_low, above=0, or_equal=True)
    check_option("clip_high", clip_high, above=0, or_equal=True)
    return math.log1p(-clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)


def clip_by_advantage(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's one-sided clipping of a log ratio x: min(x, high) if A > 0, max(x, low) if A < 0.

    With sg = sign(A):  sg * min(sg * x, sg * clip(x, low, high)), which is 0 where A = 0.

    Because exp rises, -A * exp(clip_by_advantage(x, A, log(1 - l), log(1 + h))) is PPO's
    max(-A * exp(x), -A * clip(exp(x), 1 - l, 1 + h)). Clipped first, a large x cannot overflow
    where it does not count: there the gradient would be 0 * inf.

    Args:
        log_ratio: [b, s].
        advantages: [b, s].
        low: lower bound of the log ratio.
        high: upper bound.

    Returns:
        [b, s]. Its gradient with respect to `log_ratio` is 1, and 0 where clipped or A = 0.
    """
    sign = advantages.sign()
    return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(low, high))
