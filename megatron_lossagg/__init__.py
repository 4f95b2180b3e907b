"""Loss aggregation for RL on Megatron-Core, exact in every parallel layout."""

from megatron_lossagg.agg_loss import agg_loss
from megatron_lossagg.aggregator import LossAggregator
from megatron_lossagg.config.loss_agg_config import LossAggConfig
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.reduction import count_global_batch
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.log_probs.from_logits import (
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
)
from megatron_lossagg.modes import register_mode
from megatron_lossagg.objective.terms import LossTerm
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.schedule.cp_slicing import slice_for_cp
from megatron_lossagg.version import __version__
from megatron_lossagg.weights.marks import valid_tokens
from megatron_lossagg.weights.token_weights import token_weights

__all__ = [
    "GlobalCounts",
    "LossAggConfig",
    "LossAggError",
    "LossAggregator",
    "LossTerm",
    "ParallelGroups",
    "ScheduleContract",
    "__version__",
    "agg_loss",
    "count_global_batch",
    "log_probs_and_entropy_from_logits",
    "log_probs_from_logits",
    "register_mode",
    "slice_for_cp",
    "token_weights",
    "valid_tokens",
]
