"""Counts that a driver gives instead of having them counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lossagg.counts.global_counts import GlobalCounts


def counts_by_mask(counts: Any, mask_keys: tuple[str, ...]) -> dict[str, GlobalCounts]:
    """Counts that a caller passed, by mask.

    Args:
        counts: of the first mask, or of each by its key.
        mask_keys: of the terms' masks.

    Returns:
        mask_key -> counts.

    Raises:
        TypeError: something else.
        ValueError: a mask of a term without counts.
    """
    by_mask = {mask_keys[0]: counts} if isinstance(counts, GlobalCounts) else counts
    if not isinstance(by_mask, Mapping) or not all(
        isinstance(value, GlobalCounts) for value in by_mask.values()
    ):
        raise TypeError(
            "counts must be a GlobalCounts, or a mapping from mask_key to one, got "
            f"{_kind_of_counts(by_mask)}."
        )
    missing = [key for key in mask_keys if key not in by_mask]
    if missing:
        raise ValueError(
            f"counts lacks the mask(s) {', '.join(missing)}: pass {{mask_key: "
            "GlobalCounts(...)} for every mask that a term uses."
        )
    return dict(by_mask)


def _kind_of_counts(counts: Any) -> str:
    if not isinstance(counts, Mapping):
        return type(counts).__name__
    wrong = {k: v for k, v in counts.items() if not isinstance(v, GlobalCounts)}
    kinds = ", ".join(f"{type(value).__name__} for {key!r}" for key, value in wrong.items())
    return f"{type(counts).__name__} with {kinds}"
