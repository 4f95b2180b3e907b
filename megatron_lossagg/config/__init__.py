"""Options as a dataclass, from YAML and from presets.

options          `LossAggOptions`: each option of `LossAggregator`, declared and checked once
loss_agg_config  `LossAggConfig`: the same with terms, as files hold them
term_config      a term without its function
presets          papers and frameworks, by name
"""

from megatron_lossagg.config.loss_agg_config import LossAggConfig
from megatron_lossagg.typed_fields import read_dataclass, set_option

__all__ = ["LossAggConfig", "read_dataclass", "set_option"]
