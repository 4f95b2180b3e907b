"""Options as a dataclass, from YAML and from presets."""

from megatron_lossagg.config.loss_agg_config import LossAggConfig

__all__ = ["LossAggConfig"]
