"""Names of parameters that don't depend on the layout: layers and experts count over all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

_LAYER = re.compile(r"(?P<list>.*\blayers)\.(?P<index>\d+)\.(?P<rest>.*)")
_EXPERT = re.compile(r"(?P<list>.*\blocal_experts)\.(?P<index>\d+)\.(?P<rest>.*)")


def unwrap(chunk: Any) -> Any:
    """The model inside Megatron's wrappers (DDP, Float16Module), which hold it as `module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (global name, parameter) of one model chunk, wrapped or not.

    The third layer of the model is ``decoder.layers.2.`` on whatever stage it is, and its fourth
    expert ``decoder.layers.2.mlp.experts.local_experts.3.`` on whatever rank. The output layer
    of a model with shared embeddings has the name of the embedding, of which it is a copy.
    """
    model = unwrap(chunk)
    shares_embeddings = getattr(model, "share_embeddings_and_output_weights", False)
    for name, parameter in model.named_parameters():
        name = _with_global_expert(model, name)
        match = _LAYER.fullmatch(name)
        if match:
            layer = model.get_submodule(f"{match['list']}.{match['index']}")
            if hasattr(layer, "layer_number"):  # counts from 1
                name = f"{match['list']}.{layer.layer_number - 1}.{match['rest']}"
        elif shares_embeddings and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def _with_global_expert(model: Any, name: str) -> str:
    """Local expert i of n on expert-parallel rank r is expert r * n + i."""
    match = _EXPERT.fullmatch(name)
    if not match:
        return name
    ep_rank = _parallel_state().get_expert_model_parallel_rank()
    index = ep_rank * len(model.get_submodule(match["list"])) + int(match["index"])
    return f"{match['list']}.{index}.{match['rest']}"


def sharded_dim(parameter: torch.nn.Parameter) -> int | None:
    """The dimension along which tensor parallelism splits a parameter; None if it is replicated."""
    if getattr(parameter, "tensor_model_parallel", False):
        return int(parameter.partition_dim)  # type: ignore[attr-defined]
    return None


def tensor_parallel_place(name: str) -> tuple[int, int]:
    """(rank, size) of the group that splits the parameter of this name: experts have their own."""
    parallel_state = _parallel_state()
    if _EXPERT.fullmatch(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state
