"""Counts times a mode: the weights of a step, carried by its microbatches.

token_weights  from the factor of each sequence to the weight of each token
weighting      what a weight tensor depends on: a mode and a mask
marks          zeros that tell valid tokens of weight 0 from masked ones
microbatch     the fields of a microbatch, before and after planning, and their checks
step_weights   what every kind of plan has in common
plan           counted before the step runs, or with counts that are given
deferred       counted while it runs, known when gradients are finalized
metrics        what reported values are divided by
"""

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
