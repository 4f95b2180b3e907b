"""The loss of every token, element by element. Nothing here sums: that is the aggregator's work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log q - log p: an unbiased, non-negative estimate of KL(p || q).

    Unbiased for tokens drawn from p. Source: J. Schulman, Approximating KL divergence, 2020.
    """
    return log_ratio.exp() - log_ratio - 1


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

    Inputs are replaced by 0 outside the mask before anything is exponentiated: a NaN or an inf
    there reaches neither a value nor, as 0 * NaN, a gradient.

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

    def masked(x: Tensor) -> Tensor:
        return torch.where(mask, x.float(), torch.zeros((), device=x.device))

    log_probs, advantages = masked(log_probs), masked(advantages)
    log_ratio = log_probs - masked(old_log_probs)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    if kl_coef:
        assert ref_log_probs is not None
        loss = loss + kl_coef * k3(masked(ref_log_probs) - log_probs)
    with torch.no_grad():
        is_clipped = (clipped > unclipped).float()
        # The tokens were drawn from the old policy: KL(old || new), so q is the new one.
        kl_to_old = k3(log_ratio)
        gain = advantages * log_ratio
    return TokenLosses(loss=loss, is_clipped=is_clipped, kl_to_old=kl_to_old, gain=gain)
