"""Few combinations that still hold every pair of values: faults seldom need three to show."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any


def all_pairs(*axes: Any) -> list[tuple[Any, ...]]:
    """Combinations of one value per axis such that each two values of two axes meet in one.

    Greedy and deterministic; the length is close to that of the two longest axes' product.
    """
    axes = tuple(tuple(axis) for axis in axes)
    candidates = list(product(*axes))
    missing = {pair for candidate in candidates for pair in _pairs(candidate)}
    chosen = []
    while missing:
        best = max(candidates, key=lambda candidate: len(missing & _pairs(candidate)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(candidate: tuple[Any, ...]) -> set[Any]:
    return set(combinations(enumerate(candidate), 2))
