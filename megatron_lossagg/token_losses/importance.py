"""Weights that correct for data sampled by another engine or an older policy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_lossagg.token_losses.masking import check_option, select_valid, zero_where_masked
from megatron_lossagg.token_losses.sequence_stats import TokensOfSequences

LEVELS = ("token", "sequence")


def truncated_importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    cap: float = 2.0,
    level: str = "token",
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
    cp_group: Any = None,
) -> Tensor:
    """Truncated importance sampling. With level="sequence": one all-reduce over `cp_group`.

    With x_t = old_log_probs - rollout_log_probs:

        level="token"      w_t = min(exp(x_t), cap)
        level="sequence"   w_t = min(exp(sum of x_t over the sequence), cap)

    Multiply a policy loss by it. It changes the numerator only: the denominator of a
    `loss_agg_mode` stays that of the mask.

    Args:
        old_log_probs: [b, s], of the policy before its updates, by the training engine, in nats.
        rollout_log_probs: [b, s], of the engine that sampled.
        loss_mask: [b, s], non-zero at valid tokens.
        cap: the largest weight; math.inf: no truncation.
        level: "token" or "sequence".
        sequence_ids: int [b, s], the sequence of each token, see `sequence_ids_of`; None: each row
            is a sequence.
        num_sequences: how many there are, or more; needed with `sequence_ids`.
        cp_group: the context-parallel group, if the tensors are this rank's part of the sequences.

    Returns:
        [b, s], at least float32, detached, 0 at masked positions.

    Raises:
        TypeError: an argument that is no plain tensor.
        ValueError: shapes that differ, an unknown level, an option out of range.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training". As verl's `compute_rollout_correction_weights` (verl/trainer/ppo/
    rollout_corr_helper.py), which clamps the exponent to +-20.
    """
    if level not in LEVELS:
        raise ValueError(f"Unknown level {level!r}; expected one of {', '.join(LEVELS)}.")
    check_option("cap", cap, above=0)
    mask, old_log_probs, rollout_log_probs = select_valid(
        loss_mask,
        {},
        constants={"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs},
    )
    log_ratio = old_log_probs - rollout_log_probs
    if level == "sequence":
        sequences = TokensOfSequences.of(mask != 0, sequence_ids, num_sequences, cp_group)
        [total] = sequences.sums(log_ratio)
        log_ratio = sequences.spread(total)
    return zero_where_masked(log_ratio.exp().clamp(max=cap), mask)
