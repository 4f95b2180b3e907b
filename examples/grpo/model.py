"""The model and its optimizer on this rank: a small GPT, Megatron-Core's own classes throughout.

The GPT comes from the library's test bench, since it also runs where there is no GPU and no
Transformer Engine. To train another model, build its chunks and its optimizer here.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo.config import TrainingConfig
from megatron_lossagg.testing import TinyGPT, build_model_chunks


def build_model(config: TrainingConfig, *, vocab_size: int, max_sequence_length: int) -> list[Any]:
    """This rank's model chunks, wrapped in Megatron's DDP; sets up its process groups first.

    The initial weights follow from the seed and are the same under every layout.
    """
    gpt = TinyGPT(
        num_layers=config.model.num_layers,
        hidden_size=config.model.hidden_size,
        num_heads=config.model.num_heads,
        init_std=config.model.init_std,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        dtype=torch.float32,
        seed=config.seed,
    )
    return build_model_chunks(gpt, config.layout.with_num_microbatches(config.num_microbatches))


def build_optimizer(config: TrainingConfig, chunks: list[Any]) -> Any:
    """Megatron's optimizer for the chunks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = config.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            clip_grad=options.clip_grad,
        ),
        chunks,
    )
