"""Counts times a mode: the weights of a step, carried by its microbatches."""

from megatron_lossagg.weights.token_weights import (
    WEIGHT_DTYPES,
    SequenceWeights,
    check_weight_dtype,
    sequence_weights,
    token_weights,
    weights_of_sequences,
)

__all__ = [
    "SequenceWeights",
    "WEIGHT_DTYPES",
    "check_weight_dtype",
    "sequence_weights",
    "token_weights",
    "weights_of_sequences",
]
