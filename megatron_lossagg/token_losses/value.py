"""The loss of a value head."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lossagg.token_losses.masking import check_option, select_valid, zero_where_masked


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip_value: float | None = None,
) -> Tensor:
    """PPO's value loss of every token. Does not communicate.

        l = (V - R)^2 / 2
        with clip_value c:  max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    Args:
        values: [b, s], V, of the head that is trained.
        old_values: [b, s], V_old, before the updates; without `clip_value` None will do.
        returns: [b, s], R.
        loss_mask: [b, s], non-zero at valid tokens.
        clip_value: c; None: no clipping.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ, or c not above 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, section 5, and its implementation in OpenAI
    baselines (clipping). As verl's `compute_value_loss` (verl/trainer/ppo/core_algos.py) and TRL's
    PPOTrainer, with their factor 1/2.
    """
    mask, values, returns = select_valid(
        loss_mask, {"values": values}, constants={"returns": returns}
    )
    error = (values - returns).square()
    if clip_value is not None:
        check_option("clip_value", clip_value, above=0)
        _, old_values = select_valid(loss_mask, {}, constants={"old_values": old_values})
        clipped = values.clamp(old_values - clip_value, old_values + clip_value)
        error = torch.maximum(error, (clipped - returns).square())
    return zero_where_masked(0.5 * error, mask)
