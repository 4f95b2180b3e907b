"""Rollouts as counts: what the weights of a global batch depend on."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.reduction import GlobalCounts


@dataclass(frozen=True)
class Rollouts:
    """n sequences, taken as one global batch.

    Attributes:
        num_tokens: n_s, the valid tokens of each sequence, int64 [n]; 0 where none is.
        rewards: float64 [n], or None.
        group_of_seq: the group (the prompt) of each sequence, int64 [n] in 0..U-1, or None.
        unit: what a "token" is: "tokens", "bytes" or "words".
        fields: where each came from, such as {"length": "UTF-8 bytes of 'response'"}.
    """

    num_tokens: Tensor
    rewards: Tensor | None
    group_of_seq: Tensor | None
    unit: str
    fields: dict[str, str]

    @property
    def num_groups(self) -> int:
        """U, or 0 without groups."""
        return 0 if self.group_of_seq is None else int(self.group_of_seq.max()) + 1

    @property
    def counts(self) -> GlobalCounts:
        """The counts of the global batch, with those of its units if there are groups."""
        n_s = self.num_tokens
        num_seqs = torch.tensor(len(n_s))
        if self.group_of_seq is None:
            return GlobalCounts(n_s.sum(), (n_s > 0).sum(), num_seqs)
        zeros = torch.zeros(self.num_groups, dtype=torch.int64)
        unit_num_tokens = zeros.scatter_add(0, self.group_of_seq, n_s)
        unit_num_seqs = zeros.scatter_add(0, self.group_of_seq, (n_s > 0).long())
        return GlobalCounts(n_s.sum(), (n_s > 0).sum(), num_seqs, unit_num_tokens, unit_num_seqs)

    @property
    def advantages(self) -> Tensor | None:
        """A = reward - mean reward of its group, float64 [n]; None without rewards or groups.

        Exactly 0 where all rewards of the group are equal.
        """
        if self.rewards is None or self.group_of_seq is None:
            return None
        rewards, groups = self.rewards, self.group_of_seq
        zeros = torch.zeros(self.num_groups, dtype=torch.float64)
        mean, low, high = (
            zeros.scatter_reduce(0, groups, rewards, kind, include_self=False)[groups]
            for kind in ("mean", "amin", "amax")
        )
        return torch.where(low < high, rewards - mean, 0.0)


class RolloutsBuilder:
    """Takes sequences one by one, in 8 bytes each per field.

    Its methods raise ValueError saying what was passed and what is expected.
    """

    def __init__(self) -> None:
        self._num_tokens = array("q")
        self._rewards = array("d")
        self._group_of_seq = array("q")
        self._number_of_group: dict[str | int, int] = {}

    def add_length(self, length: Any) -> None:
        """The valid tokens of the next sequence, an integer >= 0."""
        is_whole = isinstance(length, Integral) or (
            isinstance(length, Real) and float(length).is_integer()
        )
        if isinstance(length, bool) or not is_whole:
            raise ValueError(f"expected a whole number of tokens, got {length!r}")
        if length < 0:
            raise ValueError(f"a length must be >= 0, got {length!r}")
        self._num_tokens.append(int(length))

    def add_reward(self, reward: Any) -> None:
        """The reward of the next sequence, a finite number."""
        if not isinstance(reward, Real):
            raise ValueError(
                f"expected one number per response, got {shown(reward)}. For a reward made of "
                "several numbers write the one that the advantage uses"
            )
        if not math.isfinite(reward):
            raise ValueError(
                f"expected a finite number, got {float(reward)}. Leave the response out, or give "
                "it the reward that training gives it"
            )
        self._rewards.append(float(reward))

    def add_group(self, group: Any) -> None:
        """The group of the next sequence: text, an integer or chat messages, equal in a group."""
        if isinstance(group, list | dict):
            group = repr(group)
        if not isinstance(group, str | Integral):
            raise ValueError(f"expected text or an integer, got {shown(group)}")
        key = group if isinstance(group, str) else int(group)
        numbers = self._number_of_group
        self._group_of_seq.append(numbers.setdefault(key, len(numbers)))

    def build(self, unit: str, fields: dict[str, str]) -> Rollouts:
        """All that was added.

        Args:
            unit: how tokens were counted, such as "tokens" or "bytes".
            fields: which field of the file each kind was read from.

        Returns:
            The rollouts as one global batch.

        Raises:
            ValueError: there is no sequence, or none has a token.
        """
        if not self._num_tokens:
            raise ValueError("has no responses in it")
        num_tokens = torch.tensor(self._num_tokens, dtype=torch.int64)
        if int(num_tokens.max()) == 0:
            raise ValueError(
                f"none of its {len(num_tokens)} responses has a token that counts "
                f"(length from {fields['length']})"
            )
        return Rollouts(
            num_tokens,
            torch.tensor(self._rewards, dtype=torch.float64) if self._rewards else None,
            torch.tensor(self._group_of_seq, dtype=torch.int64) if self._group_of_seq else None,
            unit,
            fields,
        )


def shown(value: Any) -> str:
    """A value in an error message: cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
