"""Batches that are sampled from the model being trained."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from grpo.advantages import group_advantages
from grpo.batch import Batch
from grpo.config import GrpoConfig
from grpo.log_probs import token_log_probs
from grpo.rollout import Responses, sample_responses
from grpo.task import EOS, PAD, PROMPT_LENGTH, VOCAB_SIZE
from grpo.trainer import Trainer


class OnlineBatches:
    """Samples the batch of each step.

    Everything random in a step follows from the seed and the step's number, for the whole global
    batch at once: it depends neither on the layout nor on what came before, so a run can be resumed
    without keeping a random state.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        width = PROMPT_LENGTH + config.task.max_response_length - 1
        pieces = 2 * config.layout.cp if config.layout.cp > 1 else 1
        self.row_width = width + -width % pieces

    def batch(self, step: int, trainer: Trainer) -> Batch:
        """Sample this replica's part of a step's batch. Communicates over tp, cp and pp."""
        task, rollout = self._config.task, self._config.rollout
        prompts = task.prompts(rollout.prompts_per_step, self._generator(step, "prompts"))
        noise = torch.rand(
            self._config.sequences_per_step,
            task.max_response_length,
            generator=self._generator(step, "noise"),
            dtype=torch.float64,
        )
        dp_size, dp_rank = trainer.groups.dp_size, trainer.groups.dp.rank()
        prompts = prompts.chunk(dp_size)[dp_rank].repeat_interleave(rollout.group_size, dim=0)
        responses = sample_responses(
            trainer.chunks,
            prompts.to(trainer.device),
            noise.chunk(dp_size)[dp_rank].to(trainer.device),
            trainer.groups,
            eos=EOS,
            pad=PAD,
            num_microbatches=trainer.num_microbatches,
        )
        return self._to_batch(prompts, responses, trainer)

    def _to_batch(self, prompts: Tensor, responses: Responses, trainer: Trainer) -> Batch:
        algorithm, device = self._config.algorithm, trainer.device
        rewards = self._config.task.rewards(
            prompts, responses.tokens[:, PROMPT_LENGTH:], responses.lengths
        )
        group_ids = torch.arange(len(rewards)) // self._config.rollout.group_size
        advantages = group_advantages(
            rewards, group_ids, normalize_by_std=algorithm.normalize_by_std
        )

        num_rows, max_length = responses.log_probs.shape
        first = PROMPT_LENGTH - 1  # the position that predicts the first token of the response
        old_log_probs = torch.zeros(num_rows, self.row_width, device=device)
        old_log_probs[:, first : first + max_length] = responses.log_probs
        index = torch.arange(self.row_width, device=device) - first
        tokens = torch.nn.functional.pad(
            responses.tokens, (0, self.row_width + 1 - responses.tokens.shape[1]), value=PAD
        )
        ref_log_probs = torch.zeros_like(old_log_probs)
        if self._config.needs_reference:
            with trainer.initial_weights.in_force():
                ref_log_probs = token_log_probs(
                    trainer.chunks, tokens, trainer.groups, trainer.num_microbatches
                )
        return Batch(
            tokens=tokens,
            loss_mask=(index >= 0) & (index < responses.lengths[:, None]),
            rewards=rewards.to(device),
            advantages=advantages.to(device),
            old_log_probs=old_log_probs,
            ref_log_probs=ref_log_probs,
        )

    def _generator(self, step: int, purpose: str) -> torch.Generator:
        seed = random.Random(f"{self._config.seed}/{step}/{purpose}").getrandbits(63)
        return torch.Generator().manual_seed(seed)
