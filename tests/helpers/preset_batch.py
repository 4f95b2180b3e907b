"""A ragged batch on 2 ranks with 2 microbatches each, for comparing presets with hosts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lossagg import ParallelGroups, count_global_batch, token_weights

NUM_RANKS = NUM_MICROBATCHES = 2


@dataclass(frozen=True)
class PresetBatch:
    """Token losses and masks [ranks, microbatches, 3 rows, 6], float64 and int64."""

    losses: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def make(cls, losses=None):
        generator = torch.Generator().manual_seed(5)
        shape = (NUM_RANKS, NUM_MICROBATCHES, 3, 6)
        masks = (torch.rand(shape, generator=generator) < 0.6).long()
        masks[0, 1, 1] = 0  # a row without a valid token
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls(drawn if losses is None else losses, masks)

    @property
    def num_tokens(self):
        return int(self.masks.sum())

    @property
    def num_rows(self):
        return self.masks.shape[:3].numel()

    def host_value(self, loss_of_microbatch):
        """The mean over ranks (as DDP takes it) of the sum over microbatches."""
        parts = [
            loss_of_microbatch(self.losses[r, m], self.masks[r, m])
            for r in range(NUM_RANKS)
            for m in range(NUM_MICROBATCHES)
        ]
        return torch.stack(parts).sum() / NUM_RANKS

    def preset_value(self, config):
        """J of the preset over the global batch."""
        masks = self.masks.flatten(0, 1).unbind()
        counts = count_global_batch(masks, ParallelGroups.single_process())
        names = ("loss_agg_mode", "loss_scale_factor", "norm_semantics", "sequence_count")
        options = {name: getattr(config, name) for name in names}
        weights = [
            token_weights(mask, counts=counts, weight_dtype=torch.float64, **options)
            for mask in masks
        ]
        return (torch.stack(weights) * self.losses.flatten(0, 1)).sum()
