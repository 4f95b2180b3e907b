"""`begin_step` runs one all-reduce of 256 bytes, whatever the masks, terms and microbatches."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import LossAggregator, LossTerm, ParallelGroups

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor")
COLLECTIVES += ("all_gather_object", "reduce_scatter_tensor", "barrier", "send", "recv")


def _collectives_of_a_step(mask_keys, num_microbatches, num_units):
    """What begin_step and the first weights communicate: (name, bytes, waited for) each."""
    terms = [
        LossTerm(
            f"term {index}",
            lambda output_tensor, microbatch: output_tensor,
            "unit-mean-token-mean" if num_units else MODES[index % len(MODES)],
            mask_key=mask_key,
        )
        for index, mask_key in enumerate(mask_keys)
    ]
    aggregator = LossAggregator(
        terms=terms,
        model_config=SimpleNamespace(calculate_per_token_loss=False),
        groups=ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD),
    )
    microbatches = [
        {key: torch.ones(2, 4) for key in dict.fromkeys(("loss_mask", *mask_keys))}
        | ({"unit_ids": torch.tensor([0, 1])} if num_units else {})
        for _ in range(num_microbatches)
    ]
    calls = []

    def counting(name, original):
        def call(tensor, *args, **kwargs):
            num_bytes = tensor.numel() * tensor.element_size()
            calls.append((name, num_bytes, not kwargs.get("async_op", False)))
            return original(tensor, *args, **kwargs)

        return call

    patches = [mock.patch.object(dist, n, counting(n, getattr(dist, n))) for n in COLLECTIVES]
    for patch in patches:
        patch.start()
    try:
        step = aggregator.begin_step(microbatches, num_units=num_units or None)
        num_tokens = int(step.counts.num_tokens)
        _ = step.microbatches
    finally:
        for patch in patches:
            patch.stop()
    return calls, num_tokens


@pytest.mark.parametrize("num_microbatches", [1, 64])
@pytest.mark.parametrize(
    "mask_keys",
    [("loss_mask",), tuple(f"mask_{i}" for i in range(8)), ("loss_mask",) * 8],
    ids=["one-mask", "eight-masks", "eight-terms-of-one-mask"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_collective_of_256_bytes(rank_pool, mask_keys, num_microbatches, world_size):
    """1 and 8 masks and modes, M = 1 and 64: one all-reduce, started and not waited for."""
    results = rank_pool.run(
        _collectives_of_a_step, mask_keys, num_microbatches, 0, world_size=world_size, timeout_s=60
    )
    for calls, num_tokens in results:
        assert calls == [("all_reduce", 256, False)]
        assert num_tokens == 8 * num_microbatches * world_size


@pytest.mark.parametrize("num_units", [2, 1000])
def test_units_add_one_collective_of_16_bytes_each(rank_pool, num_units):
    """Modes with units: one more all-reduce, of 16 bytes per unit, whatever M."""
    results = rank_pool.run(
        _collectives_of_a_step, ("loss_mask",), 8, num_units, world_size=2, timeout_s=60
    )
    for calls, _ in results:
        assert calls == [("all_reduce", 256, False), ("all_reduce", 16 * num_units, False)]
