"""The trained model: this rank's part of it, and a step like Megatron-LM's `train_step`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo.batch import MICROBATCH_FIELDS, Batch
from grpo.config import TrainingConfig
from grpo.log_probs import FrozenWeights
from grpo.model import build_model, build_optimizer
from grpo.pipeline import share_from_last_stage
from grpo.policy_loss import ppo_clip_loss
from megatron_lossagg import LossAggregator, ParallelGroups, slice_for_cp
from megatron_lossagg_plugin.megatron_lm import broadcast_batch, make_forward_step

# What an update returns.
UPDATE_METRICS = ("loss", "clip_fraction", "kl_to_old", "advantage_gain", "grad_norm")


class Trainer:
    """Model chunks, optimizer and loss plugin of this rank.

    Attributes:
        chunks: this rank's model chunks, wrapped in Megatron's DDP.
        optimizer: Megatron's optimizer.
        groups: the process groups.
        device: where this rank computes.
        num_microbatches: M.
        initial_weights: the model as it was before training: the reference of the KL penalty, and
            offline the policy from which old log-probabilities come. The weights that a new model
            gets depend on the seed alone, so a resumed run has the same ones.
    """

    def __init__(
        self, config: TrainingConfig, *, vocab_size: int, max_sequence_length: int
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._algorithm = config.algorithm
        self.num_microbatches = config.num_microbatches
        self._micro_batch_size = config.micro_batch_size
        self.chunks = build_model(
            config, vocab_size=vocab_size, max_sequence_length=max_sequence_length
        )
        self.optimizer = build_optimizer(config, self.chunks)
        self.groups = ParallelGroups.from_megatron()
        self.device = next(self.chunks[0].parameters()).device
        self.initial_weights = FrozenWeights(self.chunks)
        self._run_schedule = get_forward_backward_func()
        self._token_stats: list[Tensor] = []

        # The plugin. The adapter wraps the data iterator where the loss is computed: it counts the
        # step's tokens and sequences over all replicas, and sends weights along in "loss_mask".
        aggregator = LossAggregator.from_config(
            self._token_losses, config.loss_agg, self.chunks[0].config
        )
        self._forward_step = make_forward_step(
            aggregator, self._get_batch, num_microbatches=self.num_microbatches, name="loss"
        )

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step, as `train_step` of Megatron-LM does it. All ranks call it.

        Returns:
            `UPDATE_METRICS`, the same on every rank: the global objective J; over all tokens the
            fraction that was clipped, the mean KL divergence from the old policy in nats, and the
            mean of A * log(p / p_old) in nats, above 0 if better responses have become likelier;
            and the norm of the gradient.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        microbatches = batch.microbatches(self.num_microbatches)
        reads_data = self.groups.tp_rank == 0
        self._token_stats.clear()
        reports = self._run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=[iter(microbatches) if reads_data else None for _ in self.chunks],
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            seq_length=batch.loss_mask.shape[1],
            micro_batch_size=self._micro_batch_size,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        return {**self._reduce(reports), "grad_norm": float(grad_norm or 0.0)}

    def _get_batch(self, data_iterator: Any, vp_stage: int | None = None) -> dict[str, Any]:
        """The microbatch of this chunk: read on tensor-parallel rank 0, sent to the others."""
        from megatron.core import parallel_state

        ends = (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        if not any(is_end(ignore_virtual=False, vp_stage=vp_stage) for is_end in ends):
            return {}
        microbatch = None if data_iterator is None else next(data_iterator)
        return slice_for_cp(broadcast_batch(microbatch, MICROBATCH_FIELDS, self.groups.tp))

    def _token_losses(self, output: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
        """The `loss_fn` of the plugin: the loss of every token [b, s], not reduced."""
        mask = microbatch["loss_mask"] != 0
        losses = ppo_clip_loss(
            -output,  # given labels, Megatron's GPT returns -log p
            microbatch["old_log_probs"],
            microbatch["advantages"],
            mask,
            clip_low=self._algorithm.clip_low,
            clip_high=self._algorithm.clip_high,
            ref_log_probs=microbatch["ref_log_probs"],
            kl_coef=self._algorithm.kl_coef,
        )
        sums = (losses.is_clipped.sum(), losses.kl_to_old.sum(), losses.gain.sum(), mask.sum())
        self._token_stats.append(torch.stack([x.double() for x in sums]))
        return losses.loss

    def _reduce(self, reports: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums over microbatches and dp x cp on the last stage, as Megatron-LM; then over pp."""
        totals = torch.zeros(6, dtype=torch.float64, device=self.device)
        if self.groups.is_last_stage:
            pair = torch.stack([report["loss"] for report in reports]).double().sum(dim=0)
            totals = torch.cat([pair, torch.stack(self._token_stats).sum(dim=0)])
            dist.all_reduce(totals, group=self.groups.dp_cp)
        numerator, denominator, clipped, kl, gain, num_tokens = share_from_last_stage(
            totals, self.groups
        ).tolist()
        return {
            "loss": numerator / denominator,
            "clip_fraction": clipped / num_tokens,
            "kl_to_old": kl / num_tokens,
            "advantage_gain": gain / num_tokens,
        }
