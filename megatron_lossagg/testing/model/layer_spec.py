"""The transformer block of `TinyGPT`: Megatron's own layers, without Transformer Engine or Apex."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from megatron_lossagg.testing.model.causal_attention import CausalAttention


class TorchNorm:
    """Builds torch's LayerNorm or RMSNorm, marked for Megatron's sequence parallelism.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism since it does not set the mark by
    which `finalize_model_grads` finds the parameters to sum over the tensor-parallel group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        """Return the module, in `config.params_dtype`."""
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def block_spec(config: Any, vp_stage: int | None) -> Any:
    """The submodules of one chunk's transformer block.

    Args:
        config: a `TransformerConfig`; MoE, query-key norm and RMSNorm are honoured.
        vp_stage: which chunk of this pipeline rank, None without virtual stages.

    Returns:
        Megatron's `TransformerBlockSubmodules`.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    if config.num_moe_experts is not None:
        _complete_moe_utils()
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = TorchNorm
    layer.submodules.pre_mlp_layernorm = TorchNorm
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    num_layers = get_num_layers_to_build(
        config, **supported_arguments(get_num_layers_to_build, vp_stage=vp_stage)
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TorchNorm)


def mtp_spec(config: Any, block: Any, vp_stage: int | None) -> Any:
    """The multi-token prediction layers of one chunk, built like the last layer of its block.

    Args:
        config: a `TransformerConfig`; only `mtp_num_layers` is looked at.
        block: what `block_spec` gave.
        vp_stage: as in `block_spec`.

    Returns:
        Megatron's `MultiTokenPredictionBlockSubmodules`; None on a chunk without such layers.
    """
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = get_gpt_mtp_block_spec(
        config,
        block,
        use_transformer_engine=False,
        **supported_arguments(get_gpt_mtp_block_spec, vp_stage=vp_stage),
    )
    for layer in spec.layer_specs if spec is not None else ():
        norms = layer.submodules
        norms.enorm = norms.hnorm = norms.layer_norm = TorchNorm
    return spec


def supported_arguments(function: Any, **kwargs: Any) -> dict[str, Any]:
    """Those keyword arguments that the installed Megatron's function knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in known}


def _complete_moe_utils() -> None:
    # megatron-core 0.16.1 reads this name without defining it if Transformer Engine is missing.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
