"""Runs of the real schedules by a test's own function on every rank: several steps, any order."""

from __future__ import annotations

from functools import partial

import torch
from objectives import batch_f
from prescribed import prescribed_losses

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.testing import Layout
from megatron_lossagg.testing.gradients import whole_model_gradient
from megatron_lossagg.testing.model.scalar_model import build_scalar_chunks
from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel

J = 20 / 7  # token-mean of the fixture


class Rank:
    """This rank's chunks, its microbatches of fixture F, and runs of the real schedule."""

    def __init__(self, layout: str, per_token: bool, batch=None):
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        self.layout = Layout.parse(layout)
        initialize_model_parallel(self.layout)
        self.chunks = build_scalar_chunks(self.layout, calculate_per_token_loss=per_token)
        self.config = self.chunks[0].config
        self.config.finalize_model_grads_func = finalize_model_grads
        dp_rank = parallel_state.get_data_parallel_rank()
        batch = batch_f(layout) if batch is None else batch
        self.microbatches = batch.microbatches(dp_rank)
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def aggregator(self, loss_fn=prescribed_losses, **options):
        options = {"loss_agg_mode": "token-mean", "weight_dtype": torch.float64, **options}
        return LossAggregator(loss_fn, model_config=self.config, **options)

    def stream(self, num_steps: int):
        return iter(self.microbatches * num_steps)

    def run(self, loss_func, data, *, forward_only=False, before_loss=None):
        """What a training step gives: (reports, the gradient, equal for all stages)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(data_iterator, model):
            part = slice_for_cp(next(data_iterator))
            if before_loss is not None:
                before_loss(part)
            return model(part["losses"]), partial(loss_func, part)

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        store = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[data] * len(self.chunks) if len(self.chunks) > 1 else data,
            model=self.chunks,
            num_microbatches=self.layout.num_microbatches,
            seq_length=self.microbatches[0]["losses"].shape[1],
            micro_batch_size=self.microbatches[0]["losses"].shape[0],
            forward_only=forward_only,
        )
        return store, None if forward_only else self.gradient()

    def gradient(self):
        found = whole_model_gradient(self.chunks)
        return found and [value.item() for value in found.values()]


def on_ranks(pool, function, layout, per_token, *arguments, batch=None):
    """What `function(rank, ...)` returns on every rank."""
    world_size = Layout.parse(layout).world_size
    return pool.run(
        _call, function, layout, per_token, batch, arguments, world_size=world_size, timeout_s=120
    )


def _call(function, layout, per_token, batch, arguments):
    return function(Rank(layout, per_token, batch), *arguments)


def assert_gradient(found, expected, per_token):
    bound = (1e-6 if per_token else 1e-12) * max(1, abs(expected))
    for results in filter(None, found):
        assert all(abs(value - expected) <= bound for value in results), (results, expected)
