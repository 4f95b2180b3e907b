"""A model with one number per pipeline stage, whose token losses are prescribed by the batch."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lossagg.one_number_stage import StagePlace, one_number_stage
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import set_config_hooks
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT, transformer_config
from megatron_lossagg.testing.ranks.parallel import current_device, initialize_model_parallel

# Megatron's pipeline carries activations [s, b, h]; one number per token is enough.
_SIZES = TinyGPT(num_layers=4, hidden_size=1, num_heads=1, dtype=torch.float64)


def build_scalar_chunks(
    layout: Layout, *, wrap_with_ddp: bool = True, calculate_per_token_loss: bool = False
) -> list[Any]:
    """Communicates over the groups of `layout`: build this rank's chunks, in Megatron's DDP.

    Stage i multiplies what it gets by its parameter `scale_i`, which is 1, and the first gets 1; so
    the output is [b, s] of ones and, with token losses `output * batch["losses"]`, the gradient of
    J with respect to every `scale_i` is J itself. A wrong factor shows in each of them.

    Args:
        layout: made current by this call.
        wrap_with_ddp: see `build_model_chunks`; without it a host wraps the chunks itself.
        calculate_per_token_loss: Megatron's flag of that name.

    Returns:
        One chunk per virtual stage, float64; a chunk takes the batch's mask [b, s].
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    initialize_model_parallel(layout)
    config = transformer_config(_SIZES, layout, calculate_per_token_loss=calculate_per_token_loss)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = [
        _scalar_stage(config, StagePlace(pp_rank, layout.pp, vp_stage, layout.vpp))
        for vp_stage in range(layout.vpp)
    ]
    if not wrap_with_ddp:
        return stages
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(),
            module=stage,
            disable_bucketing=vp_stage > 0,
        )
        for vp_stage, stage in enumerate(stages)
    ]
    set_config_hooks(chunks)
    return chunks


def _scalar_stage(config: Any, place: StagePlace) -> Any:
    one = torch.ones((), dtype=config.params_dtype, device=current_device())

    def ones_like_mask(mask: torch.Tensor) -> torch.Tensor:
        """[s, b, 1]."""
        return torch.ones(*mask.t().shape, 1, dtype=one.dtype, device=one.device)

    return one_number_stage(
        config,
        place,
        f"scale_{place.index}",
        one,
        first_input=ones_like_mask,
        last_output=lambda hidden: hidden.squeeze(-1).t().contiguous(),  # [b, s]
    )
