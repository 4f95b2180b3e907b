"""From masks to the counts T, B, n_s and U: one all-reduce."""

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.reduction import (
    FINGERPRINT_BITS,
    NUM_HELD,
    NUM_MASK_SLOTS,
    VECTOR_LENGTH,
    LocalCounts,
    PendingCounts,
    check_given_counts,
    count_global_batch,
    count_local,
    held_counts,
    held_place,
    start_reduction,
    sum_local,
)

__all__ = [
    "FINGERPRINT_BITS",
    "GlobalCounts",
    "LocalCounts",
    "NUM_HELD",
    "NUM_MASK_SLOTS",
    "PendingCounts",
    "VECTOR_LENGTH",
    "check_given_counts",
    "count_global_batch",
    "count_local",
    "held_counts",
    "held_place",
    "start_reduction",
    "sum_local",
]
