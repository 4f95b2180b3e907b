"""`Weighting`: what a weight tensor depends on besides the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lossagg.modes.spec import ModeSpec

# Its valid tokens are what Megatron counts under `calculate_per_token_loss`.
MAIN_MASK = "loss_mask"


@dataclass(frozen=True)
class Weighting:
    """A mode with its options, and the field of the mask that it weighs.

    Every valid token of the mask counts once. Terms of one weighting share one weight tensor.
    """

    spec: ModeSpec
    mask_key: str = MAIN_MASK


def distinct_masks(weightings: Sequence[Weighting]) -> tuple[str, ...]:
    """The mask keys of weightings, each once, in their order: the main one first."""
    return tuple(dict.fromkeys(weighting.mask_key for weighting in weightings))
