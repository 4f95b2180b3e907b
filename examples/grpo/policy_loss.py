"""The loss of every token, element by element. Nothing here sums: that is the aggregator's work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg import token_losses


@dataclass(frozen=True)
class TokenLosses:
    """What `ppo_clip_loss` computes per token; all [b, s], float32, 0 where the mask is False.

    Attributes:
        loss: the clipped policy loss plus the KL penalty; requires grad.
        is_clipped: 1 where clipping is what decides the loss, so that the token has no gradient.
        kl_to_old: k3 estimate of how far the policy has moved from the one that sampled, in nats.
        gain: advantage * log(p / p_old): above 0 if the policy moved the way the advantage says.
    """

    loss: Tensor
    is_clipped: Tensor
    kl_to_old: Tensor
    gain: Tensor


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> TokenLosses:
    """max(-A * rho, -A * clip(rho, 1 - clip_low, 1 + clip_high)) + kl_coef * k3, rho = p / p_old.

    A NaN or an inf outside the mask reaches neither a value nor a gradient.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        old_log_probs: [b, s], of the policy that sampled.
        advantages: [b, s].
        mask: bool [b, s], the tokens that count.
        clip_low: how far below 1 the ratio may be before it is clipped.
        clip_high: how far above 1.
        ref_log_probs: [b, s], of the reference model; needed if `kl_coef` is not 0.
        kl_coef: weight of the KL penalty.

    Source: Schulman et al., 2017, arXiv:1707.06347; the KL term as in arXiv:2402.03300.
    """
    if kl_coef and ref_log_probs is None:
        raise ValueError(
            f"ppo_clip_loss got kl_coef={kl_coef} but no ref_log_probs; pass the reference model's "
            "log-probabilities, or kl_coef=0."
        )

    arguments = old_log_probs, advantages, mask
    policy = token_losses.ppo_clip(log_probs, *arguments, clip_low=clip_low, clip_high=clip_high)
    loss = policy
    if kl_coef:
        loss = policy + kl_coef * token_losses.kl_penalty(log_probs, ref_log_probs, mask)
    with torch.no_grad():
        unclipped = token_losses.ppo_clip(
            log_probs, *arguments, clip_low=math.inf, clip_high=math.inf
        )
        # The tokens were drawn from the old policy: KL(old || new).
        kl_to_old = token_losses.kl_penalty(old_log_probs, log_probs, mask)
        log_ratio = (log_probs - old_log_probs).masked_fill(~mask, 0)
        gain = -token_losses.policy_gradient(log_ratio, advantages, mask)
    return TokenLosses(
        loss=loss, is_clipped=(policy > unclipped).float(), kl_to_old=kl_to_old, gain=gain
    )
