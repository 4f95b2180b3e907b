"""A step over gloo ranks without a model: what ranks do between planning and validating.

It imitates a schedule just far enough to provoke misuse; tests/megatron runs the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from megatron_lossagg import LossAggError, LossAggregator, ParallelGroups

TIMEOUT_S = 60


def data_parallel_groups() -> ParallelGroups:
    return ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)


def make_aggregator(groups=None, **options) -> LossAggregator:
    per_token = options.pop("per_token", False)
    loss_fn = None if "terms" in options else lambda output_tensor, microbatch: output_tensor
    return LossAggregator(
        options.pop("loss_fn", loss_fn),
        model_config=SimpleNamespace(calculate_per_token_loss=per_token),
        groups=data_parallel_groups() if groups is None else groups,
        **{"loss_agg_mode": "token-mean", "weight_dtype": torch.float64, **options},
    )


def make_microbatches(num_tokens_of_microbatches, loss=1.0):
    """One row of width 16 per microbatch, its first n tokens valid; losses as leaves."""
    return [
        {
            "losses": torch.full((1, 16), loss, dtype=torch.float64, requires_grad=True),
            "loss_mask": (torch.arange(16) < n).unsqueeze(0),
        }
        for n in num_tokens_of_microbatches
    ]


def run_microbatches(step, divide_by=None):
    store = []
    for microbatch in step.microbatches:
        loss, *num_tokens, report = step.loss_func(microbatch, microbatch["losses"])
        if not num_tokens:
            loss /= step.num_microbatches if divide_by is None else divide_by
        loss.backward()
        store.append(report)
    return store


def message_of(call, *args):
    """The text of the LossAggError that a call raises, or None."""
    try:
        call(*args)
    except LossAggError as error:
        return str(error)
    return None


class CollectiveCounter:
    """Counts collectives by name, and notes what all_reduce was given."""

    NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier", "reduce")

    def __init__(self):
        self.calls, self.tensors = [], []

    def __enter__(self):
        self._patches = [mock.patch.object(dist, n, self._counting(n)) for n in self.NAMES]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exc_info):
        for patch in self._patches:
            patch.stop()

    def _counting(self, name):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            self.calls.append(name)
            if isinstance(tensor, torch.Tensor):
                is_async = kwargs.get("async_op", False)
                self.tensors.append((tensor.dtype, tuple(tensor.shape), is_async))
            return original(tensor, *args, **kwargs)

        return call
