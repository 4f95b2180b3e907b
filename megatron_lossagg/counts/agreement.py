"""How ranks that were configured differently find out in what."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

_ABSENT = "absent"


def fingerprint(identity: Mapping[str, str], bits: int) -> int:
    """A number of so many bits, at most 32, that is equal on ranks whose options are."""
    return zlib.crc32(repr(dict(identity)).encode()) >> (32 - bits)


def describe_differences(identity: Mapping[str, str], group: Any) -> str:
    """What differs between the ranks of `group`: an all-gather of options, as text, over it.

    For ranks that know already that something does, from a fingerprint that was reduced over the
    same group: every one of them calls it, and a good step never does.

    Args:
        identity: this rank's options by name.
        group: a process group of at least two ranks.

    Returns:
        Each option that differs, with its values and the global ranks that have them.
    """
    ranks = dist.get_process_group_ranks(group)
    everyones: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyones, dict(identity), group=group)
    return "; ".join(differences(everyones, ranks))


def differences(identities: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """One text per option whose value is not the same in all `identities`."""
    found = []
    for option in dict.fromkeys(option for identity in identities for option in identity):
        ranks_of: dict[str, list[int]] = {}
        for identity, rank in zip(identities, ranks, strict=True):
            ranks_of.setdefault(identity.get(option, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            values = " and ".join(f"{value} on {_named(of)}" for value, of in ranks_of.items())
            found.append(f"{option} is {values}")
    return found


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
