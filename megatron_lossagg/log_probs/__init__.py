"""Log-probabilities and entropy from vocab-parallel logits."""
