"""Sampling responses from the model that is trained, through its own pipeline.

One forward pass of the schedule per token, over the whole prefix. Without a cache of keys and
values it costs more arithmetic than an inference engine, but it needs no second copy of the model,
works under every layout, and its log-probabilities are the trained model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.batch import split_rows
from grpo.pipeline import forward_only, share_from_last_stage, sum_over_cp
from megatron_lossagg import ParallelGroups


@dataclass(frozen=True)
class Responses:
    """Sampled responses of n prompts.

    Attributes:
        tokens: int64 [n, prompt_length + max_length], padded after the response.
        lengths: int64 [n], tokens of each response, EOS included.
        log_probs: float32 [n, max_length], of the sampled tokens; 0 after the response.
        has_ended: bool [n], False where the response was cut off at max_length.
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor
    has_ended: Tensor


def sample_responses(
    chunks: list[Any],
    prompts: Tensor,
    noise: Tensor,
    groups: ParallelGroups,
    *,
    eos: int,
    pad: int,
    num_microbatches: int,
) -> Responses:
    """Sample at temperature 1. Communicates over the tp, cp and pp groups of this replica.

    Each token is drawn by inverting the cumulative distribution at a given random number. So a
    response depends on the weights, its prompt and its row of `noise`, not on the layout.

    Args:
        chunks: this rank's model chunks.
        prompts: int64 [n, prompt_length], the same on all ranks of the replica.
        noise: float64 [n, max_length], uniform in [0, 1); as above.
        groups: the process groups.
        eos: the token that ends a response.
        pad: the token that fills rows.
        num_microbatches: parts of the n rows that are in the pipeline at a time.
    """
    num_rows, prompt_length = prompts.shape
    max_length = noise.shape[1]
    tokens = prompts.new_full((num_rows, prompt_length + max_length), pad)
    tokens[:, :prompt_length] = prompts
    log_probs = torch.zeros(num_rows, max_length, device=prompts.device)
    lengths = prompts.new_zeros(num_rows)
    is_open = torch.ones(num_rows, dtype=torch.bool, device=prompts.device)

    for index in range(max_length):
        position = prompt_length + index
        logits = _next_token_logits(chunks, tokens[:, :position], groups, num_microbatches)
        drawn = torch.zeros(num_rows, 2, dtype=torch.float64, device=prompts.device)
        if logits is not None:
            drawn = _draw(logits, noise[:, index])
        drawn = share_from_last_stage(drawn, groups)
        next_tokens = drawn[:, 0].long()
        tokens[:, position] = torch.where(is_open, next_tokens, pad)
        log_probs[:, index] = torch.where(is_open, drawn[:, 1].float(), 0.0)
        lengths += is_open
        is_open = is_open & (next_tokens != eos)
        if not is_open.any():
            break
    return Responses(tokens=tokens, lengths=lengths, log_probs=log_probs, has_ended=~is_open)


def _next_token_logits(
    chunks: list[Any], prefix: Tensor, groups: ParallelGroups, num_microbatches: int
) -> Tensor | None:
    """Logits [n, vocab] after `prefix` [n, p], in float64, on the last stage; None elsewhere."""
    num_rows, last = prefix.shape[0], prefix.shape[1] - 1
    pieces = 2 * groups.cp_size if groups.cp_size > 1 else 1
    prefix = torch.nn.functional.pad(prefix, (0, -prefix.shape[1] % pieces))
    positions = torch.arange(prefix.shape[1], device=prefix.device).expand(num_rows, -1)
    microbatches = split_rows({"tokens": prefix, "position_ids": positions}, num_microbatches)

    def at_last_position(logits: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        # One context-parallel rank holds that position; the others contribute zeros.
        is_last = microbatch["position_ids"][0] == last
        return logits[:, is_last].double().sum(dim=1)

    logits = forward_only(chunks, microbatches, at_last_position, with_labels=False)
    return None if logits is None else sum_over_cp(logits, groups)


def _draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw a token per row: float64 [n, 2], the token (exact to 2^53) and its log-probability."""
    log_probs = logits.log_softmax(dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    threshold = noise[:, None] * cumulative[:, -1:]
    drawn = (cumulative <= threshold).sum(dim=-1, keepdim=True)
    return torch.cat([drawn.double(), log_probs.gather(-1, drawn)], dim=-1)
