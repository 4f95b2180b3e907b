"""What happens inside the pipeline schedule: one masked multiply-and-sum times a Python number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError, keys_or_type


def masked_weighted_sum(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """S = sum of w * l over positions with w != 0. Does not communicate and does not sync.

    Positions with weight 0 are removed by selection, so a NaN or inf there changes neither the
    value nor the gradient, while a NaN that counts still shows. The gradient with respect to
    `losses` is `weights`.

    Args:
        losses: [b, s], floating point.
        weights: [b, s], floating point.

    Returns:
        (S, shape [], in at least float32; which positions count, bool [b, s]).
    """
    counts = weights != 0
    dtype = torch.promote_types(torch.promote_types(losses.dtype, weights.dtype), torch.float32)
    selected = torch.where(
        counts, losses, torch.zeros((), dtype=losses.dtype, device=losses.device)
    )
    return (selected.to(dtype) * weights.to(dtype)).sum(), counts


def weights_of(microbatch: Mapping[str, Any], weights_key: str) -> Tensor:
    """The weights that a planned microbatch carries.

    Raises:
        LossAggError: it carries none. TypeError: what it carries is not floating point.
    """
    weights = microbatch.get(weights_key) if isinstance(microbatch, Mapping) else None
    if weights is None:
        raise LossAggError(
            f"The microbatch given to loss_func carries no weights under {weights_key!r} (found: "
            f"{keys_or_type(microbatch)}). Take microbatches from step.data_iterator(...) or from "
            "aggregator.wrap(...), and keep that field through get_batch and slicing."
        )
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        found = str(weights.dtype) if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(
            f"The field {weights_key!r} given to loss_func is {found}, but weights are fractions: "
            "pass the tensor that the wrapped iterator yields, and keep it in floating point where "
            "get_batch broadcasts it."
        )
    return weights


def check_token_losses(losses: Any, weights: Tensor, where: str = "") -> None:
    """Raise unless `losses` holds one floating-point value per token. Looks at no value.

    `where` names the term or metric in the message.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"loss_fn{where} must return a tensor of per-token losses, got {type(losses).__name__}."
        )
    if losses.shape != weights.shape:
        hint = (
            "It looks reduced already: return the loss of every token and leave the sum to the "
            "plugin."
            if losses.dim() < weights.dim()
            else "If context parallelism is on, slice mask, weights and labels together with "
            "slice_for_cp; otherwise check the mask's width."
        )
        raise ValueError(
            f"loss_fn{where} returned losses of shape {tuple(losses.shape)}, but the microbatch's "
            f"weights (its mask) have shape {tuple(weights.shape)}. {hint}"
        )
    if not losses.is_floating_point():
        raise TypeError(f"loss_fn{where} must return floating-point losses, got {losses.dtype}.")
