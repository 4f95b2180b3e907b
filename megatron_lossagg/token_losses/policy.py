"""Policy losses whose ratio is that of a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lossagg.token_losses.clipping import clip_by_advantage, log_bounds
from megatron_lossagg.token_losses.masking import check_option, select_valid, zero_where_masked

# From here on a SAPO gate is flat in every floating-point format; exp stays finite.
_FLAT_GATE_LOG_RATIO = 20.0


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped loss of every token. Does not communicate.

    With rho = exp(log_probs - old_log_probs):

        l = max(-A * rho, -A * clip(rho, 1 - clip_low, 1 + clip_high))
        with dual_clip c, where A < 0:  min(l, -A * c)

    `clip_high` above `clip_low` is DAPO's clip-higher. Both math.inf: the surrogate -A * rho.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        old_log_probs: [b, s], of the policy that sampled (or of this one before its updates).
        advantages: [b, s].
        loss_mask: [b, s], non-zero at valid tokens.
        clip_low: how far below 1 the ratio counts; from 1 on there is no lower bound.
        clip_high: how far above 1 the ratio counts.
        dual_clip: c > 1, the largest ratio that counts where A < 0; None: no bound.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ, or an option out of range.

    Source: Schulman et al. 2017, arXiv:1707.06347; Ye et al. 2019, arXiv:1912.09729 (dual clip);
    Yu et al. 2025, arXiv:2503.14476 (clip-higher). As verl's `compute_policy_loss_vanilla`
    (verl/trainer/ppo/core_algos.py), which always has a dual clip (`clip_ratio_c`, 3 by default)
    and clamps the log ratio to +-20. As TRL's GRPOTrainer, whose `delta` is `dual_clip` as long as
    it is above 1 + clip_high. As torchtitan's DAPOLoss, which clamps the log ratio to +-10 and
    drops tokens with an old log-prob that is not finite: here a NaN shows.
    """
    low, high = log_bounds(clip_low, clip_high)
    mask, log_probs, old_log_probs, advantages = select_valid(
        loss_mask,
        {"log_probs": log_probs},
        constants={"old_log_probs": old_log_probs, "advantages": advantages},
    )
    log_ratio = clip_by_advantage(log_probs - old_log_probs, advantages, low, high)
    if dual_clip is not None:
        check_option("dual_clip", dual_clip, above=1)
        bounded = log_ratio.clamp(max=math.log(dual_clip))
        log_ratio = torch.where(advantages < 0, bounded, log_ratio)
    return zero_where_masked(-advantages * log_ratio.exp(), mask)


def policy_gradient(log_probs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """The plain policy gradient (REINFORCE): l = -A * log p. Does not communicate.

    Its gradient is that of -A * rho at rho = 1, so this is `ppo_clip` for data of the very policy
    that is trained. For data of an older one, without clipping: `ppo_clip` with infinite bounds.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        advantages: [b, s].
        loss_mask: [b, s], non-zero at valid tokens.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ.

    Source: Williams 1992, doi:10.1007/BF00992696. As verl's `compute_policy_loss_gpg`.
    """
    mask, log_probs, advantages = select_valid(
        loss_mask, {"log_probs": log_probs}, constants={"advantages": advantages}
    )
    return zero_where_masked(-advantages * log_probs, mask)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = math.inf,
    clip_high: float,
) -> Tensor:
    """CISPO: the policy gradient with a clipped importance weight. Does not communicate.

    With rho = exp(log_probs - old_log_probs) and sg the stop-gradient:

        l = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log_probs

    Unlike in PPO, a clipped token keeps its gradient. The default sets no lower bound, as the paper
    does; the paper names no value for the upper one.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        old_log_probs: [b, s], of the policy that sampled.
        advantages: [b, s].
        loss_mask: [b, s], non-zero at valid tokens.
        clip_low: how far below 1 the weight may be; from 1 on there is no lower bound.
        clip_high: how far above 1 the weight may be.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ, or an option out of range.

    Source: MiniMax-M1, 2025, arXiv:2506.13585. As verl's `compute_policy_loss_cispo`, which clamps
    the log ratio to +-20. TRL's `epsilon_high` is the bound itself, so 1 + clip_high.
    """
    low, high = log_bounds(clip_low, clip_high)
    mask, log_probs, old_log_probs, advantages = select_valid(
        loss_mask,
        {"log_probs": log_probs},
        constants={"old_log_probs": old_log_probs, "advantages": advantages},
    )
    weight = (log_probs.detach() - old_log_probs).clamp(low, high).exp()
    return zero_where_masked(-weight * advantages * log_probs, mask)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """SAPO: a soft gate in place of clipping. Does not communicate.

    With rho = exp(log_probs - old_log_probs), tau = tau_pos where A > 0 and tau_neg elsewhere:

        l = -A * (4 / tau) * sigmoid(tau * (rho - 1))

    At rho = 1 its gradient is that of the policy gradient.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        old_log_probs: [b, s], of the policy that sampled.
        advantages: [b, s].
        loss_mask: [b, s], non-zero at valid tokens.
        tau_pos: temperature where A > 0; the larger, the narrower the gate.
        tau_neg: temperature elsewhere.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ, or a temperature that is not above 0.

    Source: Gao et al. 2025, arXiv:2511.20347. As verl's `compute_policy_loss_sapo` and TRL's
    `loss_type="sapo"`, with their defaults.
    """
    check_option("tau_pos", tau_pos, above=0)
    check_option("tau_neg", tau_neg, above=0)
    mask, log_probs, old_log_probs, advantages = select_valid(
        loss_mask,
        {"log_probs": log_probs},
        constants={"old_log_probs": old_log_probs, "advantages": advantages},
    )
    ratio = (log_probs - old_log_probs).clamp(max=_FLAT_GATE_LOG_RATIO).exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return zero_where_masked(-advantages * gate, mask)
