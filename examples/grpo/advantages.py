"""Group-relative advantages: how much better a response is than the others to its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# Against division by a standard deviation of 0, where every advantage is 0 anyway.
EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool) -> Tensor:
    """A = r - mean(group), divided by std(group) if asked for (GRPO; Dr.GRPO leaves it out).

    The standard deviation has n - 1 in its denominator. A group whose rewards are all equal, or
    that has one member, gets advantages of 0.

    Args:
        rewards: float [n].
        group_ids: int64 [n], the group of each response, 0..num_groups-1. Groups may differ in
            size.
        normalize_by_std: divide by the group's standard deviation.

    Returns:
        float32 [n].

    Source: Shao et al., DeepSeekMath, 2024, arXiv:2402.03300; Liu et al., Understanding
    R1-Zero-Like Training, 2025, arXiv:2503.20783.
    """
    values = rewards.double()
    num_groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    sizes = torch.bincount(group_ids, minlength=num_groups).double()

    def sum_of_group(x: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=x.dtype).index_add_(0, group_ids, x)

    mean = sum_of_group(values) / sizes.clamp(min=1)
    centered = values - mean[group_ids]
    if normalize_by_std:
        variance = sum_of_group(centered.square()) / (sizes - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group_ids] + EPSILON)
    return centered.float()
