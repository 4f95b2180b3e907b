"""What Megatron does to a returned loss, and how it is undone.

M microbatches, D data-parallel and C context-parallel ranks; S is one microbatch's and rank's part
of the sum of w * l:

    regime  loss_func returns  calculate_per_token_loss  S is multiplied by
    R1      loss               False                     M * D
    R2      loss, 1            False                     M * D * C
    R3      loss, num_tokens   True                      1, and its weights by T
    R4      loss               True                      M / C

C enters what a loss is multiplied by in `factors` alone (DDP's mean, the schedule's own x C, the
backward of a gather); masks and weights are cut to C ranks in `cp_slicing`. Which file holds what:

    factors         the table in full and its arithmetic: `Regime`, `ScheduleFactors`
    named_factors   the same factors one by one, for people
    contract        `ScheduleContract`: `detect` reads the regime from a config, `measure` tries it
    options         the words that returns, cp_gradient, contract and denominators may be
    probe           what the installed Megatron-Core does where releases differ
    refusals        settings in which a loss would not arrive as it should
    measure         a model of one number per stage, driven through the caller's schedule
    measured_ratio  what its gradients are, beside what they should be
    model_config    where the model's config comes from, and when
    run             which run of the schedule the caller is in
    finalize_hook   what runs around `finalize_model_grads_func`
    cp_slicing      `slice_for_cp`, by Megatron's own slicer
"""

from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.schedule.factors import MAX_NUM_TOKENS_R3, Regime, ScheduleFactors, regime_of
from megatron_lossagg.schedule.model_config import check_model_config
from megatron_lossagg.schedule.options import (
    CONTRACTS,
    CP_GRADIENTS,
    DENOMINATORS,
    RETURNS,
    CPGradient,
    Denominators,
    Returns,
    check_options,
)

__all__ = [
    "CONTRACTS",
    "CP_GRADIENTS",
    "DENOMINATORS",
    "MAX_NUM_TOKENS_R3",
    "RETURNS",
    "CPGradient",
    "Denominators",
    "Regime",
    "Returns",
    "ScheduleContract",
    "ScheduleFactors",
    "check_model_config",
    "check_options",
    "regime_of",
]
