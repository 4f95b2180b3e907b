"""The summands of the objective, token by token. Nothing here sums: that is the aggregator's work.

Which of them a run has, each with its mode and coefficient, is in its YAML file under
`loss_agg.terms`; J = sum over them of coefficient * value is minimised.

    policy    the clipped policy loss of PPO
    kl        k3 estimate of KL(policy || model before training), in nats
    entropy   of the policy's distribution, in nats; a negative coefficient keeps it up
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg import log_probs_and_entropy_from_logits, token_losses

POLICY, KL, ENTROPY = "policy", "kl", "entropy"
TERMS = (POLICY, KL, ENTROPY)

# What the policy term reports besides, as means over all tokens:
POLICY_METRICS = {
    "clip_fraction": "tokens",  # where clipping decides the loss, so that there is no gradient
    "kl_to_old": "tokens",  # k3 estimate of how far the policy is from the one that sampled, nats
    "advantage_gain": "tokens",  # A * log(p / p_old): above 0 if better responses became likelier
}


@dataclass(frozen=True)
class PolicyOutput:
    """What all terms start from; both [b, s], float32, in nats, 0 where the mask is.

    Attributes:
        log_probs: of the labels.
        entropy: of the distribution that the label was drawn from.
    """

    log_probs: Tensor
    entropy: Tensor


def policy_output(logits: Tensor, microbatch: Mapping[str, Any]) -> PolicyOutput:
    """From vocab-parallel logits [b, s, vocab / TP]. Two small all-reduces over tp, see there."""
    return PolicyOutput(
        *log_probs_and_entropy_from_logits(logits, microbatch["labels"], microbatch["loss_mask"])
    )


def ppo_clip_term(
    clip_low: float, clip_high: float
) -> Callable[[PolicyOutput, Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]:
    """The policy term with these bounds: (losses [b, s], `POLICY_METRICS` [b, s])."""

    def policy(
        output: PolicyOutput, microbatch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, old_log_probs = output.log_probs, microbatch["old_log_probs"]
        advantages, mask = microbatch["advantages"], microbatch["loss_mask"]
        arguments = log_probs, old_log_probs, advantages, mask
        losses = token_losses.ppo_clip(*arguments, clip_low=clip_low, clip_high=clip_high)
        with torch.no_grad():
            unclipped = token_losses.ppo_clip(*arguments, clip_low=math.inf, clip_high=math.inf)
            log_ratio = (log_probs - old_log_probs).masked_fill(mask == 0, 0)
            metrics = {
                "clip_fraction": (losses > unclipped).float(),
                # The tokens were drawn from the old policy: KL(old || new).
                "kl_to_old": token_losses.kl_penalty(old_log_probs, log_probs, mask),
                "advantage_gain": -token_losses.policy_gradient(log_ratio, advantages, mask),
            }
        return losses, metrics

    return policy


def kl_term(output: PolicyOutput, microbatch: Mapping[str, Any]) -> Tensor:
    """The k3 estimate of every token, [b, s]."""
    return token_losses.kl_penalty(
        output.log_probs, microbatch["ref_log_probs"], microbatch["loss_mask"]
    )


def entropy_term(output: PolicyOutput, microbatch: Mapping[str, Any]) -> Tensor:
    """The entropy at every token, [b, s]."""
    return output.entropy
