"""A loss aggregation mode is a name and a factor per sequence, computed from counts.

Let T be the valid tokens, B the sequences of the global batch, n_s the valid tokens of sequence s
and L the `loss_scale_factor`. Every mode is a weight per valid token,
`J = sum_s sum_t w_st * l_st`:

    token-mean                                  w = 1 / T            sum of w = 1
    token-sum                                   w = 1                sum of w = T
    seq-mean-token-sum                          w = 1 / B            sum of w = T / B
    seq-mean-token-mean                         w = 1 / (B * n_s)    sum of w = B_valid / B
    seq-mean-token-sum-norm, "sum"              w = 1 / L            sum of w = T / L
    seq-mean-token-sum-norm, "seq-mean"         w = 1 / (B * L)      sum of w = T / (B * L)
    unit-mean-token-sum                         w = 1 / U                  sum of w = T / U
    unit-mean-token-mean                        w = 1 / (U * T_u)          sum of w = U_valid / U
    unit-mean-seq-mean-token-mean               w = 1 / (U * B_u * n_s)    sum of w = U_valid / U
    length-power-A, A from 0 to 4               w = n_s^-A / B             (`length_power.py`)

U is the number of units (rollouts of several samples, or a prompt's answers), T_u and B_u the valid
tokens and valid sequences of the sequence's unit, over the global batch. `sequence_count` says
whether B and U count those with a valid token, or all of them.

The weight is the same for every valid token of a sequence, so a mode is a function that returns one
factor per sequence. A count of zero gives a weight of zero, never a division by zero.

To add one to the library, give `table.BUILT_IN` an entry with its factor and its formula; the table
above and those of the READMEs are held against it. A user's own needs `register_mode` alone.

    table         what a mode is, and the built-in ones
    spec          `ModeSpec`: a mode with its options, which is what travels
    options       the options of a mode, declared once
    registry      modes by name; `register_mode`
    place         which place registered a mode
    length_power  the modes length-power-A
    unread        a warning for an option that a mode does not read
"""

from megatron_lossagg.modes.options import (
    NORM_SEMANTICS,
    SEQUENCE_COUNTS,
    ModeOptions,
    NormSemantics,
    SequenceCount,
    check_loss_scale_factor,
    check_norm_semantics,
)
from megatron_lossagg.modes.registry import (
    IMPORT_VARIABLE,
    OWN_MODES_HINT,
    get_mode,
    import_named_modules,
    mode_names,
    register_mode,
    registered_by,
    registered_names,
)
from megatron_lossagg.modes.spec import ModeSpec, undivided_counts
from megatron_lossagg.modes.table import AggregationMode, ModeInputs, reciprocal_or_zero

__all__ = [
    "IMPORT_VARIABLE",
    "NORM_SEMANTICS",
    "OWN_MODES_HINT",
    "SEQUENCE_COUNTS",
    "AggregationMode",
    "ModeInputs",
    "ModeOptions",
    "ModeSpec",
    "NormSemantics",
    "SequenceCount",
    "check_loss_scale_factor",
    "check_norm_semantics",
    "get_mode",
    "import_named_modules",
    "mode_names",
    "reciprocal_or_zero",
    "register_mode",
    "registered_by",
    "registered_names",
    "undivided_counts",
]
