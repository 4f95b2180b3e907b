"""A test bench: the real, unmodified Megatron-Core on CPU processes, in float64 or float32.

Megatron itself is imported when it is first needed, inside functions.
"""

from megatron_lossagg.testing.batch.global_batch import GlobalBatch, ragged_batch
from megatron_lossagg.testing.batch.packed_batch import (
    PackedBatch,
    pack_batch,
    pack_rows,
    packed_seq_params,
)
from megatron_lossagg.testing.gradients import (
    relative_error,
    whole_model_gradient,
    whole_model_parameters,
)
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import (
    build_model_chunks,
    model_output,
    token_log_probs,
)
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT, check_p2p_is_safe
from megatron_lossagg.testing.ranks.device_shim import (
    cpu_shim_installed,
    install_cpu_shim,
    uninstall_cpu_shim,
)
from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel
from megatron_lossagg.testing.ranks.rank_failure import RankFailure
from megatron_lossagg.testing.ranks.rank_pool import RankPool
from megatron_lossagg.testing.reference import reference_gradient, reference_loss, reference_run
from megatron_lossagg.testing.run import RunResult, StepContext, StepPlan, run_global_batch
from megatron_lossagg.testing.sum_loss_plan import SumLossPlan

__all__ = [
    "GlobalBatch",
    "Layout",
    "PackedBatch",
    "RankFailure",
    "RankPool",
    "RunResult",
    "StepContext",
    "StepPlan",
    "SumLossPlan",
    "TinyGPT",
    "build_model_chunks",
    "check_p2p_is_safe",
    "cpu_shim_installed",
    "initialize_model_parallel",
    "install_cpu_shim",
    "model_output",
    "pack_batch",
    "pack_rows",
    "packed_seq_params",
    "ragged_batch",
    "reference_gradient",
    "reference_loss",
    "reference_run",
    "relative_error",
    "run_global_batch",
    "token_log_probs",
    "uninstall_cpu_shim",
    "whole_model_gradient",
    "whole_model_parameters",
]
