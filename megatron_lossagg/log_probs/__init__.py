"""Log-probabilities and entropy from vocab-parallel logits."""

from megatron_lossagg.log_probs.from_logits import (
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
)

__all__ = ["log_probs_and_entropy_from_logits", "log_probs_from_logits"]
