"""The mark of a valid token whose weight is 0: the sign of its zero.

A tensor of weights also has to tell which tokens are valid, because it may have displaced the mask:
`calculate_per_token_loss` divides by their number, and multi-token prediction has a loss over them.
A masked token carries +0.0, a valid one whatever its weight is, and -0.0 if that is 0. The sign
survives broadcasts, slicing and casts between floating-point types; adding 0.0 would lose it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_zeros(factors: Tensor, is_valid: Tensor) -> Tensor:
    """`factors` with -0.0 where one is 0 and `is_valid`; by selection, as 0 * -1 is -0.0, too."""
    return torch.where((factors == 0) & is_valid, -0.0, factors)


def valid_tokens(weights: Tensor) -> Tensor:
    """Which tokens of a planned microbatch are valid, whatever their weights are.

    Valid: the mask is 1 and no `sample_mask` marks the row as padding. That is `weights != 0`, and
    -0.0 where a mode gives a valid token the weight 0. Neither communicates nor syncs.

    Args:
        weights: [b, s] or any slice of it, floating point, as a planned microbatch carries them.

    Returns:
        bool of the same shape.

    Raises:
        TypeError: not floating point, so that zeros have lost their sign.
    """
    if not weights.is_floating_point():
        raise TypeError(
            f"valid_tokens expects weights in floating point, got {weights.dtype}: zeros have lost "
            "their sign. Pass the field that a planned microbatch carries."
        )
    if torch.compiler.is_compiling():
        return (weights != 0) | torch.signbit(weights)
    # +0.0 alone has no bit set, and one comparison is cheaper than two.
    bits: Tensor = weights.view(_BITS[weights.element_size()]) != 0
    return bits
