"""The trained model: this rank's part of it, and a step like Megatron-LM's `train_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo.batch import MICROBATCH_FIELDS, Batch
from grpo.config import TrainingConfig
from grpo.log_probs import FrozenWeights
from grpo.model import build_model, build_optimizer
from grpo.terms import (
    ENTROPY,
    KL,
    POLICY,
    POLICY_METRICS,
    entropy_term,
    kl_term,
    policy_output,
    ppo_clip_term,
)
from megatron_lossagg import LossAggregator, ParallelGroups, slice_for_cp
from megatron_lossagg_plugin.megatron_lm import broadcast_batch, make_forward_step


class Trainer:
    """Model chunks, optimizer and loss plugin of this rank.

    Attributes:
        chunks: this rank's model chunks, wrapped in Megatron's DDP.
        optimizer: Megatron's optimizer.
        groups: the process groups.
        device: where this rank computes.
        num_microbatches: M.
        metric_names: what `update` returns.
        initial_weights: the model as it was before training: the reference of the KL penalty, and
            offline the policy from which old log-probabilities come. The weights that a new model
            gets depend on the seed alone, so a resumed run has the same ones.
    """

    def __init__(
        self, config: TrainingConfig, *, vocab_size: int, max_sequence_length: int
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

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
        self._step = 0

        # The plugin. The adapter wraps the data iterator where the loss is computed: it counts the
        # step's tokens and sequences over all replicas, and sends weights along in "loss_mask" (and
        # "loss_mask_1", ... if terms differ in their modes).
        terms = config.loss_terms
        functions: dict[str, Callable[..., Any]] = {
            POLICY: ppo_clip_term(config.algorithm.clip_low, config.algorithm.clip_high),
            KL: kl_term,
            ENTROPY: entropy_term,
        }
        aggregator = LossAggregator.from_config(
            {term.name: functions[term.name] for term in terms.terms},
            terms,
            self.chunks[0].config,
            prepare=policy_output,
        )
        self._aggregator = aggregator
        self._fields = tuple(dict.fromkeys((*MICROBATCH_FIELDS, *aggregator.weights_keys)))
        names = (term.name for term in terms.terms)
        self.metric_names = ("loss", *names, *POLICY_METRICS, "grad_norm")
        self._forward_step = make_forward_step(
            aggregator,
            self._get_batch,
            call_model=_call_model,
            num_microbatches=self.num_microbatches,
            iteration=lambda: self._step,
            name="loss",
        )

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """One optimizer step, as `train_step` of Megatron-LM does it. All ranks call it.

        A batch without a token to train on leaves model and optimizer as they are.

        Args:
            batch: this replica's part of the global batch.
            step: of the run, for coefficients that change.

        Returns:
            `metric_names`, the same on every rank: the objective J of the global batch, the value
            of its terms, `POLICY_METRICS` (NaN over no token), and the norm of the gradient.
        """
        self._step = step
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        microbatches = batch.microbatches(self.num_microbatches)
        reads_data = self.groups.tp_rank == 0
        reports = self._run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=[iter(microbatches) if reads_data else None for _ in self.chunks],
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            seq_length=batch.loss_mask.shape[1],
            micro_batch_size=self._micro_batch_size,
            forward_only=False,
        )
        metrics = self._aggregator.report(reports)
        grad_norm = 0.0
        if not self._aggregator.is_empty:
            _, grad_norm, _ = self.optimizer.step()
        return {**metrics, "grad_norm": float(grad_norm or 0.0)}

    def _get_batch(self, data_iterator: Any, vp_stage: int | None = None) -> dict[str, Any]:
        """The microbatch of this chunk: read on tensor-parallel rank 0, sent to the others."""
        from megatron.core import parallel_state

        ends = (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        if not any(is_end(ignore_virtual=False, vp_stage=vp_stage) for is_end in ends):
            return {}
        microbatch = None if data_iterator is None else next(data_iterator)
        return slice_for_cp(broadcast_batch(microbatch, self._fields, self.groups.tp))


def _call_model(model: Any, microbatch: dict[str, Tensor]) -> Tensor:
    """Without labels, a GPT returns logits of its part of the vocabulary."""
    return model(microbatch.get("tokens"), microbatch.get("position_ids"), None)
