"""What a small GPT is: its sizes, and Megatron's configuration of it under a layout.

`model_chunks` builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.layout.layout import Layout


@dataclass(frozen=True)
class TinyGPT:
    """What the model is, apart from how it is spread over ranks.

    GELU, no dropout, no fusions, no Transformer Engine.

    Attributes:
        num_layers: a multiple of PP * VPP.
        hidden_size: a multiple of `num_heads`.
        num_heads: attention heads, a multiple of TP.
        vocab_size: a multiple of TP.
        max_sequence_length: longest row.
        dtype: of parameters, activations and gradients: torch.float64 or torch.float32.
        seed: changes all weights.
        init_std: standard deviation of the weights; norms are drawn around 1, biases around 0.
        share_embeddings: whether the output layer uses the word embeddings.
        position_embedding_type: "learned_absolute", or "none" (causal attention alone tells
            positions apart). Megatron has no learned positions with multi-token prediction.
        overrides: more fields of Megatron's `TransformerConfig`, such as ``num_moe_experts`` or
            ``mtp_num_layers``.
    """

    num_layers: int = 4
    hidden_size: int = 16
    num_heads: int = 4
    vocab_size: int = 32
    max_sequence_length: int = 64
    dtype: torch.dtype = torch.float64
    seed: int = 0
    init_std: float = 0.2
    share_embeddings: bool = False
    position_embedding_type: str = "learned_absolute"
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def check_fits(self, layout: Layout) -> None:
        """Raise ValueError if the sizes cannot be divided as `layout` wants."""
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"TinyGPT: dtype must be torch.float32 or float64, got {self.dtype}")
        if self.overrides.get("mtp_num_layers") and self.position_embedding_type != "none":
            raise ValueError(
                "TinyGPT: mtp_num_layers needs position_embedding_type='none', got "
                f"{self.position_embedding_type!r}: nothing would reduce the gradient of learned "
                "positions over the stages that use them"
            )
        stages = layout.pp * layout.vpp
        splits_layers_itself = any("pipeline" in name for name in self.overrides)
        for name, size, divisor, meaning in (
            ("num_layers", 0 if splits_layers_itself else self.num_layers, stages, "PP * VPP"),
            ("num_heads", self.num_heads, layout.tp, "TP"),
            ("vocab_size", self.vocab_size, layout.tp, "TP"),
            ("hidden_size", self.hidden_size, self.num_heads, "num_heads"),
            ("num_moe_experts", self.overrides.get("num_moe_experts") or 1, layout.ep, "EP"),
        ):
            if size % divisor:
                raise ValueError(
                    f"TinyGPT: {name} must be a multiple of {meaning} = {divisor}, got {size} "
                    f"for layout '{layout}'"
                )
        if layout.tp > 1 and self.overrides.get("gated_linear_unit"):
            raise ValueError(
                "TinyGPT: gated_linear_unit needs TP=1 here: the gate and the value share a "
                "matrix, so a tensor-parallel shard is not one slice of the full weight"
            )


def transformer_config(
    gpt: TinyGPT, layout: Layout, *, calculate_per_token_loss: bool = False
) -> Any:
    """Megatron's `TransformerConfig` for a model and a layout, as its training script sets it up.

    Args:
        gpt: the model; its `overrides` win over what is set here.
        layout: sizes of the groups; with virtual stages, also the number of microbatches.
        calculate_per_token_loss: Megatron's flag of that name.

    Returns:
        The config.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    # A group as large as all microbatches is the one size that suits any number of them.
    has_remainder = layout.vpp > 1 and layout.num_microbatches % layout.pp != 0
    fields: dict[str, Any] = {
        "num_layers": gpt.num_layers,
        "hidden_size": gpt.hidden_size,
        "num_attention_heads": gpt.num_heads,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1 if layout.ep > 1 else None,
        "sequence_parallel": layout.sequence_parallel,
        "microbatch_group_size_per_vp_stage": layout.num_microbatches if has_remainder else None,
        "params_dtype": gpt.dtype,
        "pipeline_dtype": gpt.dtype,
        "calculate_per_token_loss": calculate_per_token_loss,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        # See check_p2p_is_safe. Freed outputs are what Megatron's training script has, and a loss
        # must cope with them, so they are used where they are safe.
        "deallocate_pipeline_outputs": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }
    if gpt.overrides.get("variable_seq_lengths"):
        # Megatron refuses its default, "allgather", even for a model without experts.
        fields["moe_token_dispatcher_type"] = "alltoall"
    return TransformerConfig(**{**fields, **gpt.overrides})


def check_p2p_is_safe(config: Any, pp_size: int, vpp_size: int, backend: str) -> None:
    """Refuse the pipeline transfers that give wrong numbers without an error.

    Batched transfers: of two pipeline ranks with virtual stages each is both neighbours of the
    other, and a batched exchange posts two messages each way between them. Backends match these in
    order of posting, so activations and gradients change places. `overlap_p2p_comm` without
    `batch_p2p_comm` is right.

    Freed outputs: `deallocate_pipeline_outputs` swaps the storage of a tensor whose send has only
    been started if `overlap_p2p_comm` is on. On a CUDA stream the send comes first; gloo sends from
    its own threads and may read memory that is in use for something else by then.

    Args:
        config: the model's `TransformerConfig`.
        pp_size: pipeline-parallel size.
        vpp_size: model chunks per pipeline rank.
        backend: name of the torch.distributed backend of the pipeline group.

    Raises:
        LossAggError: for these two combinations.
    """
    is_ordered = config.overlap_p2p_comm and not config.batch_p2p_comm
    if pp_size == 2 and vpp_size > 1 and not is_ordered:
        raise LossAggError(
            f"Pipeline size 2 with virtual stages, overlap_p2p_comm={config.overlap_p2p_comm} and "
            f"batch_p2p_comm={config.batch_p2p_comm}: transfers between the same two ranks are "
            "matched in order and swap activations with gradients, silently. Set "
            "overlap_p2p_comm=True and batch_p2p_comm=False in the TransformerConfig"
        )
    if (
        config.overlap_p2p_comm
        and config.deallocate_pipeline_outputs
        and vpp_size > 1
        and backend != "nccl"
    ):
        raise LossAggError(
            f"overlap_p2p_comm=True with deallocate_pipeline_outputs=True over {backend} sends "
            "from memory that is already freed, which gives wrong numbers now and then: set "
            "deallocate_pipeline_outputs=False in the TransformerConfig"
        )
