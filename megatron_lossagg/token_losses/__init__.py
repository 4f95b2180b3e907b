"""The loss of every token: element-wise, nothing reduced. Needs torch alone.

Every function takes tensors of the mask's shape, [b, s] or packed [1, t], and returns one of that
shape, to be summed with the weights of a `loss_agg_mode`. They go into a `loss_fn` as they are:

    from megatron_lossagg import LossAggregator, token_losses

    def loss_fn(output, microbatch):  # output: [b, s], what GPTModel(..., labels=labels) returns
        log_probs, mask = -output, microbatch["loss_mask"]
        policy = token_losses.ppo_clip(
            log_probs, microbatch["old_log_probs"], microbatch["advantages"], mask,
            clip_low=0.2, clip_high=0.28,
        )
        kl = token_losses.kl_penalty(log_probs, microbatch["ref_log_probs"], mask, estimator="k3")
        return policy + 0.001 * kl

    aggregator = LossAggregator(loss_fn, loss_agg_mode="token-mean", model_config=config)

Truncated importance sampling multiplies a policy loss:

    weights = token_losses.truncated_importance_weights(
        microbatch["old_log_probs"], microbatch["rollout_log_probs"], mask, cap=2.0
    )
    return weights * policy

Where a loss needs the whole sequence (`gspo`, `gmpo`, sequence-level importance weights), packed
sequences are told apart by `sequence_ids`, made once from `cu_seqlens`. They are one more field of
the microbatch, sliced like its tokens. Under context parallelism give the group, too:

    microbatch["sequence_ids"] = token_losses.sequence_ids_of(cu_seqlens, tokens.shape[1])
    microbatch = slice_for_cp(microbatch)
    ...
    token_losses.gspo(
        log_probs, old_log_probs, advantages, mask,
        sequence_ids=microbatch["sequence_ids"],
        num_sequences=microbatch["cu_seqlens"].numel() - 1,
        cp_group=groups.cp,
    )

In common:
- A mask's non-zero entries are the valid tokens, so a tensor of weights may stand for the mask.
- At masked positions inputs are replaced by 0 before anything is computed from them, and the loss
  is 0: a NaN or inf there reaches neither a value nor a gradient. At a valid token it shows.
- Computed in the inputs' dtype, at least float32. No host synchronisation on a GPU.
- Gradients reach `log_probs`, `values` and `entropy`. What the formulas call old, advantages,
  returns and weights are constants: they are detached.
- There is no clamp on log ratios "for stability" and no epsilon in a division. Clipping is done on
  log ratios before `exp`, so a token that is clipped cannot overflow; one that is not, and has a
  log ratio above 88 in float32, gives inf and shows.
"""

from megatron_lossagg.token_losses.importance import truncated_importance_weights
from megatron_lossagg.token_losses.kl import kl_penalty
from megatron_lossagg.token_losses.likelihood import entropy_bonus, sft_nll
from megatron_lossagg.token_losses.policy import cispo, policy_gradient, ppo_clip, sapo
from megatron_lossagg.token_losses.sequence_policy import gmpo, gspo
from megatron_lossagg.token_losses.sequence_stats import sequence_ids_of
from megatron_lossagg.token_losses.value import value_loss

__all__ = [
    "cispo",
    "entropy_bonus",
    "gmpo",
    "gspo",
    "kl_penalty",
    "policy_gradient",
    "ppo_clip",
    "sapo",
    "sequence_ids_of",
    "sft_nll",
    "truncated_importance_weights",
    "value_loss",
]
