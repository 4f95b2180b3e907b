"""Losses that are a log-probability or an entropy with its sign."""

from __future__ import annotations

from torch import Tensor

from megatron_lossagg.token_losses.masking import select_valid, zero_where_masked


def sft_nll(log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """The negative log-likelihood of every token: l = -log p. Does not communicate.

    Args:
        log_probs: [b, s], of the labels, in nats.
        loss_mask: [b, s], non-zero at valid tokens.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ.

    Source: the cross-entropy of one label. As Megatron's GPTModel returns it with `labels`, and as
    verl's `sft_loss` before its aggregation.
    """
    mask, log_probs = select_valid(loss_mask, {"log_probs": log_probs})
    return zero_where_masked(-log_probs, mask)


def entropy_bonus(entropy: Tensor, loss_mask: Tensor) -> Tensor:
    """Minus the entropy of every token's distribution: l = -H. Does not communicate.

    Adding it, times a coefficient, to a loss that is minimised keeps the entropy up.

    Args:
        entropy: [b, s], H = -sum over the vocabulary of p * log p, in nats.
        loss_mask: [b, s], non-zero at valid tokens.

    Returns:
        [b, s], at least float32, 0 at masked positions; nothing is reduced.

    Raises:
        ValueError: shapes that differ.

    Source: Williams and Peng 1991; Mnih et al. 2016, arXiv:1602.01783. verl and TRL keep H positive
    and subtract it.
    """
    mask, entropy = select_valid(loss_mask, {"entropy": entropy})
    return zero_where_masked(-entropy, mask)
