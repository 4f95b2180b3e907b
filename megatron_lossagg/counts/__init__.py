"""From masks to the counts T, B, n_s and U: one all-reduce.

masks          which tokens of each row count
sequences      rows and packed sequences: n_s of each
units          several sequences that are averaged first: T_u and B_u
global_counts  `GlobalCounts`, the numbers of one global batch
reduction      the vector of a rank, and its all-reduce over data-parallel ranks
given_counts   counts that a driver gives instead
agreement      how ranks that were configured differently find out in what
"""

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
