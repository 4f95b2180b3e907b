"""What Megatron does to a returned loss, and how it is undone."""

from megatron_lossagg.schedule.contract import (
    CONTRACTS,
    CP_GRADIENTS,
    DENOMINATORS,
    MAX_NUM_TOKENS_R3,
    RETURNS,
    ScheduleContract,
    check_model_config,
    check_options,
    regime_of,
)

__all__ = [
    "CONTRACTS",
    "CP_GRADIENTS",
    "DENOMINATORS",
    "MAX_NUM_TOKENS_R3",
    "RETURNS",
    "ScheduleContract",
    "check_model_config",
    "check_options",
    "regime_of",
]
