"""The batch of one data-parallel replica, and the microbatches that a schedule takes from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What a microbatch is made of; tensor-parallel ranks without data get these fields by broadcast.
MICROBATCH_FIELDS = (
    "tokens",
    "labels",
    "position_ids",
    "loss_mask",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
)


@dataclass(frozen=True)
class Batch:
    """Responses with their rewards; all ranks of one replica hold the same.

    n is the number of sequences, s the row width. Fields of width s are aligned with the labels,
    `tokens[:, 1:]`: entry t is about the token that follows position t.

    Attributes:
        tokens: int64 [n, s + 1]: prompt, response, padding.
        loss_mask: bool [n, s], True where the label is a token of the response.
        rewards: float32 [n].
        advantages: float32 [n].
        old_log_probs: float32 [n, s], of the policy that sampled, or of the one before training.
        ref_log_probs: float32 [n, s], of the reference model; zeros if there is no term `kl`.
    """

    tokens: Tensor
    loss_mask: Tensor
    rewards: Tensor
    advantages: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor

    @property
    def num_sequences(self) -> int:
        """Sequences of this replica."""
        return self.tokens.shape[0]

    @property
    def response_lengths(self) -> Tensor:
        """int64 [n], tokens of each response that are trained on."""
        return self.loss_mask.sum(dim=1)

    def microbatches(self, num_microbatches: int) -> list[dict[str, Tensor]]:
        """Cut the rows into microbatches: dicts of [b, s] tensors, with all `MICROBATCH_FIELDS`.

        Advantages are repeated along the row, so that context parallelism can slice every field
        alike.
        """
        width = self.loss_mask.shape[1]
        fields = {
            **token_fields(self.tokens),
            "loss_mask": self.loss_mask.float(),
            "old_log_probs": self.old_log_probs,
            "ref_log_probs": self.ref_log_probs,
            "advantages": self.advantages[:, None].expand(-1, width),
        }
        return split_rows(fields, num_microbatches)


def token_fields(tokens: Tensor) -> dict[str, Tensor]:
    """What a language model needs of `tokens` [n, s + 1]: inputs, labels and positions, [n, s]."""
    n, width = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(width, device=tokens.device).expand(n, -1)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}


def split_rows(fields: dict[str, Tensor], num_microbatches: int) -> list[dict[str, Tensor]]:
    """Cut all fields along dimension 0 into `num_microbatches` equal parts."""
    num_rows = next(iter(fields.values())).shape[0]
    if num_rows % num_microbatches:
        raise ValueError(f"{num_rows} rows cannot be cut into {num_microbatches} microbatches.")
    rows = num_rows // num_microbatches
    return [
        {key: value[i * rows : (i + 1) * rows].contiguous() for key, value in fields.items()}
        for i in range(num_microbatches)
    ]
