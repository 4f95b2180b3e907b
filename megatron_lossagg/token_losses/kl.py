"""Estimates of the KL divergence from sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lossagg.token_losses.masking import select_valid, zero_where_masked

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_penalty(
    log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor, *, estimator: str = "k3"
) -> Tensor:
    """Estimate KL(p || ref) at every token that p sampled. Does not communicate.

    With x = ref_log_probs - log_probs:

        k1   -x                   unbiased; its gradient has expectation 0
        k2   x^2 / 2              biased, but its gradient is that of the KL on average
        k3   exp(x) - x - 1       unbiased and never negative; its gradient is another one
        k1+, k3+                  the value of k1 or k3 with the gradient of k2 (straight-through)

    The sentences hold for tokens drawn from p itself, which is what `log_probs` belong to.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        ref_log_probs: [b, s], of the reference; gradients reach it, too, if it requires any.
        loss_mask: [b, s], non-zero at valid tokens.
        estimator: one of the above.

    Returns:
        [b, s], nats, at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ, or an unknown estimator.

    Source: Schulman 2020, "Approximating KL Divergence"; k3 in GRPO: Shao et al. 2024,
    arXiv:2402.03300. As verl's `kl_penalty` (verl/trainer/ppo/core_algos.py), which clamps x to
    +-20 and k3 to at most 10 (above, its k3 has no gradient); as the KL term of TRL's GRPOTrainer.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"Unknown estimator {estimator!r}; expected one of {', '.join(ESTIMATORS)}."
        )
    mask, log_probs, ref_log_probs = select_valid(
        loss_mask, {"log_probs": log_probs, "ref_log_probs": ref_log_probs}
    )
    log_ratio = ref_log_probs - log_probs
    value = _estimate(log_ratio, estimator.removesuffix("+"))
    if estimator.endswith("+"):
        k2 = _estimate(log_ratio, "k2")
        value = value.detach() + (k2 - k2.detach())
    return zero_where_masked(value, mask)


def _estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    # exp(x) - 1 - x would lose every digit of the small x that are usual.
    return torch.expm1(log_ratio) - log_ratio
