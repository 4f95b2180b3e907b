"""What the weights of each mode come to: by length, by reward, and as a push up or down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.explain.buckets import (
    Bucket,
    length_buckets,
    reward_buckets,
    shortest_and_longest,
)
from megatron_lossagg.explain.mode_weights import ModeWeights, mode_labels, weigh
from megatron_lossagg.explain.rollouts import Rollouts


@dataclass(frozen=True)
class Push:
    """How strongly a mode raises and lowers log-probabilities, on policy and without clipping.

    With A = reward - mean reward of the group, the gradient of J with respect to a token's
    log-probability is -w A: up is the sum of w A over tokens with A > 0, down that of -w A over
    those with A < 0.
    """

    up: float
    down: float

    @property
    def down_share(self) -> float:
        """The part of the push that lowers, down / (up + down), 0.5 where both are balanced."""
        return self.down / (self.up + self.down)


@dataclass(frozen=True)
class Explanation:
    """Rollouts, taken as one global batch, and the weights that modes give them.

    Attributes:
        source: the file's name.
        rollouts: what was read.
        loss_scale_factor: L of the norm mode.
        is_default_factor: L was not given: it is the length of the longest response.
        modes: their weights.
        lengths: buckets by length.
        rewards: buckets by reward; empty without rewards.
        short: the shortest tenth of the responses.
        long: the longest tenth.
    """

    source: str
    rollouts: Rollouts
    loss_scale_factor: float
    is_default_factor: bool
    modes: list[ModeWeights]
    lengths: list[Bucket]
    rewards: list[Bucket]
    short: Bucket
    long: Bucket

    @classmethod
    def of(
        cls,
        source: str,
        rollouts: Rollouts,
        labels: Sequence[str] | None = None,
        loss_scale_factor: float | None = None,
        num_buckets: int = 5,
    ) -> Explanation:
        """Weigh the rollouts.

        Args:
            source: the file's name.
            rollouts: one global batch.
            labels: modes, see `mode_labels`; None takes all that are possible.
            loss_scale_factor: L; None takes the longest response.
            num_buckets: how many buckets of length, at least 1.

        Returns:
            The weights of every mode and the buckets they are shown in.

        Raises:
            ValueError: an unknown mode, an L that cannot divide, or no bucket.
        """
        if num_buckets < 1:
            raise ValueError(f"the number of buckets must be at least 1, got {num_buckets}")
        labels = mode_labels(rollouts.group_of_seq is not None) if labels is None else labels
        factor = loss_scale_factor
        if factor is None:
            factor = float(rollouts.num_tokens.max())
        short, long = shortest_and_longest(rollouts)
        return cls(
            source=source,
            rollouts=rollouts,
            loss_scale_factor=factor,
            is_default_factor=loss_scale_factor is None,
            modes=weigh(rollouts, labels, factor),
            lengths=length_buckets(rollouts, num_buckets),
            rewards=reward_buckets(rollouts),
            short=short,
            long=long,
        )

    @cached_property
    def families(self) -> list[list[ModeWeights]]:
        """Modes with the same share for every sequence: within a family only the scale differs."""
        families: list[list[ModeWeights]] = []
        for mode in self.modes:
            for family in families:
                if torch.allclose(mode.shares, family[0].shares, rtol=1e-9, atol=0):
                    family.append(mode)
                    break
            else:
                families.append([mode])
        return families

    @cached_property
    def _advantages(self) -> Tensor | None:
        return self.rollouts.advantages

    @property
    def num_valid_seqs(self) -> int:
        """B: sequences with a token that counts."""
        return int((self.rollouts.num_tokens > 0).sum())

    def share(self, mode: ModeWeights, bucket: Bucket) -> float:
        """The part of the mode's whole weight that the bucket has."""
        return float(mode.shares[bucket.members].sum())

    def share_of_responses(self, bucket: Bucket) -> float:
        """The part of the valid sequences that are in the bucket."""
        return int(bucket.members.sum()) / self.num_valid_seqs

    def mean_length(self, bucket: Bucket) -> float:
        """Tokens per sequence of the bucket."""
        return float(self.rollouts.num_tokens[bucket.members].double().mean())

    def token_weight(self, mode: ModeWeights, bucket: Bucket) -> float:
        """The mean of w over the valid tokens of the bucket."""
        tokens = self.rollouts.num_tokens[bucket.members].sum()
        return float(mode.of_sequence[bucket.members].sum() / tokens)

    def sequence_weight(self, mode: ModeWeights, bucket: Bucket) -> float:
        """The mean of n_s w over the sequences of the bucket."""
        return float(mode.of_sequence[bucket.members].mean())

    def relative_token_weight(self, mode: ModeWeights, bucket: Bucket) -> float:
        """`token_weight` over the mean of w over all tokens: 1 where every token is alike."""
        mean = mode.total / int(self.rollouts.num_tokens.sum())
        return self.token_weight(mode, bucket) / mean

    def push(self, mode: ModeWeights) -> Push | None:
        """None without rewards or groups, and where no group has two different rewards."""
        if not self.has_push:
            return None
        assert self._advantages is not None  # has_push says so
        pushes = mode.of_sequence * self._advantages
        return Push(float(pushes.clamp(min=0).sum()), float(-pushes.clamp(max=0).sum()))

    @cached_property
    def has_push(self) -> bool:
        """Whether some response with a token has an advantage that is not 0."""
        advantages = self._advantages
        return advantages is not None and bool(advantages[self.rollouts.num_tokens > 0].any())

    def net_push(self, mode: ModeWeights, bucket: Bucket) -> float:
        """The sum of w A over the bucket, over that of w |A| over all; 0 where nothing pushes.

        Above 0 the mode raises such responses on the whole, below 0 it lowers them.
        """
        push = self.push(mode)
        if push is None or self._advantages is None:
            return 0.0
        net = (mode.of_sequence * self._advantages)[bucket.members].sum()
        return float(net) / (push.up + push.down)

    def long_low_and_short_high(self) -> tuple[Bucket, Bucket] | None:
        """Long responses of the lowest reward and short ones of the highest, if both are there."""
        if len(self.rewards) < 2:
            return None
        low, high = self.rewards[0], self.rewards[-1]
        long_low = Bucket(f"long {low.label}", self.long.members & low.members)
        short_high = Bucket(f"short {high.label}", self.short.members & high.members)
        there = bool(long_low.members.any()) and bool(short_high.members.any())
        return (long_low, short_high) if there else None

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        rollouts = self.rollouts
        rewards = rollouts.rewards
        return {
            "source": self.source,
            "unit": rollouts.unit,
            "fields": rollouts.fields,
            "num_seqs": len(rollouts.num_tokens),
            "num_valid_seqs": self.num_valid_seqs,
            "num_tokens": int(rollouts.num_tokens.sum()),
            "num_groups": rollouts.num_groups or None,
            "mean_reward": None if rewards is None else float(rewards.mean()),
            "loss_scale_factor": self.loss_scale_factor,
            "families": [[mode.label for mode in family] for family in self.families],
            "modes": {mode.label: self._mode_dict(mode) for mode in self.modes},
        }

    def _mode_dict(self, mode: ModeWeights) -> dict[str, Any]:
        push = self.push(mode)
        return {
            "formula": mode.formula,
            "sum_of_weights": mode.total,
            "shortest": self._bucket_dict(mode, self.short),
            "longest": self._bucket_dict(mode, self.long),
            "by_length": [self._bucket_dict(mode, bucket) for bucket in self.lengths],
            "by_reward": [self._bucket_dict(mode, bucket) for bucket in self.rewards],
            "push": None if push is None else {"up": push.up, "down": push.down},
        }

    def _bucket_dict(self, mode: ModeWeights, bucket: Bucket) -> dict[str, Any]:
        return {
            "bucket": bucket.label,
            "num_seqs": int(bucket.members.sum()),
            "mean_length": self.mean_length(bucket),
            "share_of_responses": self.share_of_responses(bucket),
            "share_of_weight": self.share(mode, bucket),
            "net_push": None if self.push(mode) is None else self.net_push(mode, bucket),
            "token_weight": self.token_weight(mode, bucket),
            "sequence_weight": self.sequence_weight(mode, bucket),
        }
