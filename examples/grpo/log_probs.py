"""Log-probabilities of given tokens under the model, or under weights it had before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo.batch import split_rows, token_fields
from grpo.pipeline import forward_only, share_from_last_stage, sum_over_cp
from megatron_lossagg import ParallelGroups


def token_log_probs(
    chunks: list[Any], tokens: Tensor, groups: ParallelGroups, num_microbatches: int
) -> Tensor:
    """Communicates over the tp, cp and pp groups: log p of every token but the first of a row.

    Args:
        chunks: this rank's model chunks.
        tokens: int64 [n, s + 1], the same on all ranks of the replica.
        groups: the process groups.
        num_microbatches: parts of the n rows that are in the pipeline at a time.

    Returns:
        float32 [n, s], aligned with the labels, on all ranks of the replica.
    """
    width = tokens.shape[1] - 1
    microbatches = split_rows(token_fields(tokens), num_microbatches)

    def at_full_width(output: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        # This context-parallel rank's columns in their places, zeros in the others'.
        full = output.new_zeros(output.shape[0], width, dtype=torch.float32)
        full[:, microbatch["position_ids"][0]] = -output.float()
        return full

    log_probs = forward_only(chunks, microbatches, at_full_width, with_labels=True)
    if log_probs is None:
        log_probs = torch.zeros(tokens.shape[0], width, device=tokens.device)
    else:
        log_probs = sum_over_cp(log_probs, groups)
    return share_from_last_stage(log_probs, groups)


class FrozenWeights:
    """A copy of the weights as they are now: the reference, or the policy before training."""

    def __init__(self, chunks: list[Any]) -> None:
        self._parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._copies = [p.detach().clone() for p in self._parameters]

    @contextmanager
    @torch.no_grad()
    def in_force(self) -> Iterator[None]:
        """Within the block the model has these weights; after it, its own again."""
        own = [p.detach().clone() for p in self._parameters]
        self._set(self._copies)
        try:
            yield
        finally:
            self._set(own)

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
