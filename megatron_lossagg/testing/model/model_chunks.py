"""Build Megatron's real `GPTModel` for a `TinyGPT`, with the same weights under every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from megatron_lossagg.testing.batch.packed_batch import packed_seq_params
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.layer_spec import block_spec, mtp_spec, supported_arguments
from megatron_lossagg.testing.model.parameter_names import (
    named_parameters,
    sharded_dim,
    tensor_parallel_place,
    unwrap,
)
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT, check_p2p_is_safe, transformer_config
from megatron_lossagg.testing.ranks.parallel import current_device, initialize_model_parallel


def build_model_chunks(
    gpt: TinyGPT,
    layout: Layout,
    *,
    wrap_with_ddp: bool = True,
    calculate_per_token_loss: bool = False,
    use_distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    ddp_overrides: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Communicates over the groups of `layout`: build this rank's part of the model.

    Args:
        gpt: the model.
        layout: made current by this call.
        wrap_with_ddp: wrap each chunk in Megatron's `DistributedDataParallel`, and set the hooks of
            the config as its training script does. Otherwise gradients stay in `param.grad`.
        calculate_per_token_loss: Megatron's flag of that name.
        use_distributed_optimizer: of `DistributedDataParallelConfig`.
        overlap_grad_reduce: of `DistributedDataParallelConfig`.
        ddp_overrides: more fields of `DistributedDataParallelConfig`.

    Returns:
        One chunk per virtual stage. A chunk takes (tokens, position_ids, None) of shape [b, s] and
        gives vocab-parallel logits [b, s, vocab / TP] on the last stage; see `token_log_probs`.
        With multi-token prediction it also needs labels and a loss_mask of 0 and 1, [b, s], and
        gives Megatron's own token losses [b, s], which are computed in float32.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    gpt.check_fits(layout)
    initialize_model_parallel(layout)
    config = transformer_config(gpt, layout, calculate_per_token_loss=calculate_per_token_loss)
    backend = torch.distributed.get_backend(parallel_state.get_pipeline_model_parallel_group())
    check_p2p_is_safe(config, layout.pp, layout.vpp, backend)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for stage in range(layout.vpp):
        vp_stage = stage if layout.vpp > 1 else None
        if vp_stage is not None:  # releases before 0.13 ask parallel_state which chunk is built
            parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        block = block_spec(config, vp_stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=gpt.vocab_size,
            max_sequence_length=gpt.max_sequence_length,
            pre_process=pp_rank == 0 and stage == 0,
            post_process=pp_rank == layout.pp - 1 and stage == layout.vpp - 1,
            share_embeddings_and_output_weights=gpt.share_embeddings,
            position_embedding_type=gpt.position_embedding_type,
            mtp_block_spec=mtp_spec(config, block, vp_stage),
            **supported_arguments(GPTModel, vp_stage=vp_stage),
        )
        # Megatron makes the position embeddings in float32 whatever params_dtype says.
        model.to(current_device(), gpt.dtype)
        initialize_by_name(model, gpt)
        chunks.append(model)
    if wrap_with_ddp:
        ddp_fields = {
            "use_distributed_optimizer": use_distributed_optimizer
            or layout.optimizer_instances > 1,
            "num_distributed_optimizer_instances": layout.optimizer_instances,
            "overlap_grad_reduce": overlap_grad_reduce,
            **(ddp_overrides or {}),
        }
        chunks = _wrap(config, chunks, ddp_fields)
        set_config_hooks(chunks)
    return chunks


def _wrap(config: Any, chunks: list[Any], ddp_fields: dict[str, Any]) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(**ddp_fields),
            module=chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def set_config_hooks(chunks: list[Any]) -> None:
    """Set the functions through which a schedule calls DDP, as Megatron's training loop does.

    Wrappers that a test has put around them are dropped.

    Args:
        chunks: this rank's chunks, wrapped in DDP.
    """
    from megatron.core.distributed import finalize_model_grads

    config = unwrap(chunks[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        start_grad_sync = [chunk.start_grad_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        config.grad_sync_func = start_grad_sync if len(chunks) > 1 else start_grad_sync[0]


@torch.no_grad()
def initialize_by_name(model: Any, gpt: TinyGPT) -> None:
    """Draw each parameter from a generator seeded by its global name: full tensor, then the shard.

    Args:
        model: one chunk, not wrapped.
        gpt: seed and standard deviation.
    """
    for name, parameter in named_parameters(model):
        tp_rank, tp_size = tensor_parallel_place(name)
        dim = sharded_dim(parameter)
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= tp_size
        digest = hashlib.sha256(f"{gpt.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full = gpt.init_std * torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name.rsplit(".", 2)[-2] and name.endswith("weight"):
            full += 1.0
        parameter.copy_(full if dim is None else full.chunk(tp_size, dim)[tp_rank])


def model_output(model: Any, microbatch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Communicates over the tensor- and context-parallel groups: what a chunk makes of its part.

    Args:
        model: one chunk, in DDP or not.
        microbatch: this context-parallel rank's part, with tokens and position_ids [b, s / C];
            packed if it has "cu_seqlens", which every stage must have then.

    Returns:
        vocab-parallel logits [b, s / C, vocab / TP] on the last stage, activations before it.
    """
    return model(
        microbatch["tokens"],
        microbatch["position_ids"],
        None,
        packed_seq_params=packed_seq_params(microbatch),
    )


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Communicates over the tensor-parallel group: log probability of each label.

    Megatron's own vocab-parallel cross entropy computes in float32; this stays in the dtype of the
    logits.

    Args:
        logits: [b, s, vocab / TP], what the last chunk returns.
        labels: int64 [b, s].

    Returns:
        [b, s], the same on all tensor-parallel ranks; gradients flow to this rank's logits.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    full = gather_from_tensor_model_parallel_region(logits)
    return full.log_softmax(dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
