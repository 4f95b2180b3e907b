"""Sequences sorted into buckets by length and by reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg.explain.rollouts import Rollouts

# Rewards with more distinct values than this are shown by their quantiles.
_MAX_REWARDS_ONE_BY_ONE = 4


@dataclass(frozen=True)
class Bucket:
    """Some of the sequences that have a valid token.

    Attributes:
        label: what they have in common, such as "138-222".
        members: bool [n].
    """

    label: str
    members: Tensor


def length_buckets(rollouts: Rollouts, number: int) -> list[Bucket]:
    """Up to `number` buckets of about as many sequences each; equal lengths stay together."""
    return _quantile_buckets(rollouts.num_tokens, rollouts.num_tokens > 0, number, _length_label)


def reward_buckets(rollouts: Rollouts) -> list[Bucket]:
    """One bucket per reward if there are few of them, else up to four by quantiles."""
    if rollouts.rewards is None:
        return []
    is_valid = rollouts.num_tokens > 0
    values = rollouts.rewards[is_valid].unique(sorted=True).tolist()
    if len(values) > _MAX_REWARDS_ONE_BY_ONE:
        return _quantile_buckets(rollouts.rewards, is_valid, 4, _reward_label)
    names = [f"reward {value:g}" for value in values]
    if values in ([0.0, 1.0], [-1.0, 1.0]):
        names = [f"wrong ({names[0]})", f"right ({names[1]})"]
    return [
        Bucket(name, is_valid & (rollouts.rewards == value))
        for name, value in zip(names, values, strict=True)
    ]


def shortest_and_longest(rollouts: Rollouts, part: float = 0.1) -> tuple[Bucket, Bucket]:
    """The shortest and the longest `part` of the valid sequences, at least one of each.

    Among equal lengths at the border the earlier ones count as shorter.
    """
    n_s = rollouts.num_tokens
    order = torch.argsort(n_s, stable=True)
    order = order[n_s[order] > 0]
    size = max(1, int(len(order) * part))
    buckets = []
    for name, chosen in (("shortest", order[:size]), ("longest", order[-size:])):
        members = torch.zeros(len(n_s), dtype=torch.bool)
        members[chosen] = True
        buckets.append(Bucket(f"{name} {part:.0%}", members))
    return buckets[0], buckets[1]


def _length_label(low: float, high: float) -> str:
    return f"{low:,}" if low == high else f"{low:,}\N{EN DASH}{high:,}"


def _reward_label(low: float, high: float) -> str:
    return f"reward {low:.3g}" if low == high else f"reward {low:.3g} to {high:.3g}"


def _quantile_buckets(
    values: Tensor, is_valid: Tensor, number: int, label: Callable[[float, float], str]
) -> list[Bucket]:
    ordered = values[is_valid].sort().values
    ranks = [max(0, -(-len(ordered) * k // number) - 1) for k in range(1, number + 1)]
    edges = sorted({ordered[rank].item() for rank in ranks})
    buckets = []
    below = None
    for edge in edges:
        members = is_valid & (values <= edge)
        if below is not None:
            members &= values > below
        buckets.append(Bucket(label(values[members].min().item(), edge), members))
        below = edge
    return buckets
