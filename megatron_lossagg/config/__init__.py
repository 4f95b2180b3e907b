"""Options as a dataclass, from YAML and from presets."""

from megatron_lossagg.config.loss_agg_config import LossAggConfig
from megatron_lossagg.typed_fields import read_dataclass, set_option

__all__ = ["LossAggConfig", "read_dataclass", "set_option"]
