"""Policy losses whose ratio is that of a whole sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_lossagg.token_losses.clipping import clip_by_advantage, log_bounds
from megatron_lossagg.token_losses.masking import check_option, select_valid, zero_where_masked
from megatron_lossagg.token_losses.sequence_stats import TokensOfSequences


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
    cp_group: Any = None,
) -> Tensor:
    """GSPO: PPO's clipped loss with the ratio of the sequence. One all-reduce over `cp_group`.

    With x_t = log_probs - old_log_probs, n the sequence's valid tokens and sg the stop-gradient:

        s   = exp(sum of x_t over the sequence / n)
        s_t = sg(s) * p_t / sg(p_t)                       p_t = exp(log_probs), so s_t = s in value
        l_t = max(-A_t * s_t, -A_t * clip(s_t, 1 - clip_low, 1 + clip_high))

    This is the paper's GSPO-token: the gradient of a token's loss is -A_t * s on its own log-prob
    alone. Where A and the weight are the same for all tokens of a sequence, as in every
    `loss_agg_mode`, the sum over the sequence has the gradient of the paper's GSPO, in which s is
    differentiated: there each of n losses gives A * s / n to each of n tokens. So the reduction
    needs no backward pass. The paper takes `seq-mean-token-mean`.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        old_log_probs: [b, s], of the policy that sampled.
        advantages: [b, s].
        loss_mask: [b, s], non-zero at valid tokens.
        clip_low: how far below 1 the ratio counts; from 1 on there is no lower bound.
        clip_high: how far above 1 the ratio counts.
        sequence_ids: int [b, s], the sequence of each token, see `sequence_ids_of`; None: each row
            is a sequence.
        num_sequences: how many there are, or more; needed with `sequence_ids`.
        cp_group: the context-parallel group, if the tensors are this rank's part of the sequences.
            None if they are whole: also for whole sequences on every context-parallel rank.

    Returns:
        [b, s], at least float32, 0 at masked positions; the losses are not reduced.

    Raises:
        TypeError: an argument that is no plain tensor.
        ValueError: shapes that differ, an option out of range, ids without their number.

    Source: Zheng et al. 2025, arXiv:2507.18071. As verl's `compute_policy_loss_gspo`, which clamps
    log s_t to at most 10. TRL's `importance_sampling_level="sequence"` is the paper's GSPO.
    """
    low, high = log_bounds(clip_low, clip_high)
    mask, log_probs, old_log_probs, advantages = select_valid(
        loss_mask,
        {"log_probs": log_probs},
        constants={"old_log_probs": old_log_probs, "advantages": advantages},
    )
    sequences = TokensOfSequences.of(mask != 0, sequence_ids, num_sequences, cp_group)
    log_ratio = sequences.mean(log_probs.detach() - old_log_probs)
    log_ratio = sequences.spread(log_ratio) + (log_probs - log_probs.detach())
    clipped = clip_by_advantage(log_ratio, advantages, low, high)
    return zero_where_masked(-advantages * clipped.exp(), mask)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
    cp_group: Any = None,
) -> Tensor:
    """GMPO: the geometric mean of clipped token ratios. One all-reduce over `cp_group`, each way.

    With x_t = log_probs - old_log_probs and n the sequence's valid tokens, for every token:

        c_t = min(x_t, clip_high) if A_t > 0, max(x_t, -clip_low) if A_t < 0, 0 if A_t = 0
        l   = -A_t * exp(sum of c_t over the sequence / n)

    The bounds are in log space: a ratio counts between exp(-clip_low) and exp(clip_high). Every
    token's loss depends on all tokens of its sequence, so the backward pass sums over `cp_group`,
    too. The paper's objective is `seq-mean-token-mean` of this.

    Args:
        log_probs: [b, s], of the policy that is trained, in nats.
        old_log_probs: [b, s], of the policy that sampled.
        advantages: [b, s], in the paper the same for all tokens of a sequence.
        loss_mask: [b, s], non-zero at valid tokens.
        clip_low: how far below 0 a token's log ratio counts.
        clip_high: how far above 0 a token's log ratio counts.
        sequence_ids: int [b, s], the sequence of each token, see `sequence_ids_of`; None: each row
            is a sequence.
        num_sequences: how many there are, or more; needed with `sequence_ids`.
        cp_group: the context-parallel group, if the tensors are this rank's part of the sequences.
            None if they are whole: also for whole sequences on every context-parallel rank.

    Returns:
        [b, s], at least float32, 0 at masked positions; the losses are not reduced.

    Raises:
        TypeError: an argument that is no plain tensor.
        ValueError: shapes that differ, an option out of range, ids without their number.

    Source: Zhao et al. 2025, arXiv:2507.20673 (bounds of +-0.4). As verl's
    `compute_policy_loss_geo_mean`, which takes the mean over all rows, fully masked ones included
    (`sequence_count="nominal"`), and adds 1e-8 to n; as TRL's GMPOTrainer.
    """
    check_option("clip_low", clip_low, above=0, or_equal=True)
    check_option("clip_high", clip_high, above=0, or_equal=True)
    mask, log_probs, old_log_probs, advantages = select_valid(
        loss_mask,
        {"log_probs": log_probs},
        constants={"old_log_probs": old_log_probs, "advantages": advantages},
    )
    sequences = TokensOfSequences.of(mask != 0, sequence_ids, num_sequences, cp_group)
    clipped = clip_by_advantage(log_probs - old_log_probs, advantages, -clip_low, clip_high)
    log_ratio = sequences.spread(sequences.mean(clipped))
    return zero_where_masked(-advantages * log_ratio.exp(), mask)
