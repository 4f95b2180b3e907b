"""Megatron's own optimizers run on the bench: the device shim answers what they assert."""

from __future__ import annotations

import pytest
import torch

from megatron_lossagg.testing import (
    Layout,
    SumLossPlan,
    TinyGPT,
    build_model_chunks,
    ragged_batch,
    relative_error,
    run_global_batch,
    whole_model_parameters,
)

_LAYOUT = Layout.parse("PP=2 D=2 M=2")
_GPT = TinyGPT(num_layers=2, dtype=torch.float32)


def _train(batch, use_distributed_optimizer):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunks = build_model_chunks(_GPT, _LAYOUT, use_distributed_optimizer=use_distributed_optimizer)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        params_dtype=torch.float32,
        use_distributed_optimizer=use_distributed_optimizer,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        result = run_global_batch(batch, _LAYOUT, SumLossPlan(100.0), chunks=chunks)
        losses.append(result.report)
        assert optimizer.step()[0]
    names = [type(part).__name__ for part in optimizer.chained_optimizers]
    return names, losses, whole_model_parameters(chunks)


def test_both_optimizers_train_with_equal_numbers(rank_pool):
    """FP32Optimizer and DistributedOptimizer: the loss falls, and the weights agree."""
    batch = ragged_batch(8, dp=2, num_microbatches=2)
    names, losses, plain = rank_pool.run(_train, batch, False)[0]
    assert names == ["FP32Optimizer"]
    assert losses[0] > losses[1] > losses[2]
    names, sharded_losses, sharded = rank_pool.run(_train, batch, True)[0]
    assert names == ["DistributedOptimizer"]
    assert sharded_losses == pytest.approx(losses, rel=1e-6)
    assert relative_error(sharded, plain) < 1e-6
