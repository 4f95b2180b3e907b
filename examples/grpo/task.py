"""The task `count`: say a digit as often as asked. Prompts, and a verifier that gives the reward.

A prompt is three tokens, `n x =`, with a count n in 1..max_count and a digit x; the answer is x, n
times, and then EOS. So answers have different lengths, and to be right a model has to learn when to
stop. Nothing but this file knows the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_DIGITS = 10
EQUALS = 10
EOS = 11
PAD = 12
# The next multiple of 16: it splits evenly over tensor-parallel ranks.
VOCAB_SIZE = 16
PROMPT_LENGTH = 3


@dataclass(frozen=True, kw_only=True)
class CountTask:
    """Prompts and rewards of the task.

    Attributes:
        max_count: the largest count that is asked for.
        max_response_length: tokens at which a response is cut off, EOS included.
    """

    max_count: int = 6
    max_response_length: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.max_count < NUM_DIGITS:
            raise ValueError(
                f"task.max_count={self.max_count} cannot be asked for: a prompt has one digit for "
                f"it. Choose 1 to {NUM_DIGITS - 1}."
            )
        if self.max_response_length <= self.max_count:
            raise ValueError(
                f"task.max_response_length={self.max_response_length} is too short: the longest "
                f"answer has {self.max_count + 1} tokens with EOS. Raise it, or lower "
                "task.max_count."
            )

    @property
    def mean_answer_length(self) -> float:
        """Mean length of a right answer in tokens, EOS included."""
        return (1 + self.max_count) / 2 + 1

    def prompts(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Draw prompts: int64 [num_prompts, PROMPT_LENGTH]."""
        counts = torch.randint(1, self.max_count + 1, (num_prompts,), generator=generator)
        digits = torch.randint(0, NUM_DIGITS, (num_prompts,), generator=generator)
        return torch.stack([counts, digits, torch.full_like(counts, EQUALS)], dim=1)

    def answer(self, prompt: Tensor) -> list[int]:
        """The right response to one prompt [PROMPT_LENGTH]."""
        count, digit, _ = prompt.tolist()
        return [digit] * count + [EOS]

    def reward(self, prompt: Tensor, response: list[int]) -> float:
        """Matching positions / length of the longer one, in [0, 1]; 1 only for the right answer.

        Args:
            prompt: int64 [PROMPT_LENGTH].
            response: its tokens up to EOS, which is included; without EOS if it was cut off.
        """
        answer = self.answer(prompt)
        num_matching = sum(a == b for a, b in zip(answer, response, strict=False))
        return num_matching / max(len(answer), len(response))

    def rewards(self, prompts: Tensor, responses: Tensor, lengths: Tensor) -> Tensor:
        """Rewards of a batch: float32 [n].

        Args:
            prompts: int64 [n, PROMPT_LENGTH].
            responses: int64 [n, max_response_length].
            lengths: int64 [n], tokens of each response.
        """
        rows = zip(prompts, responses.tolist(), lengths.tolist(), strict=True)
        return torch.tensor([self.reward(prompt, row[:length]) for prompt, row, length in rows])
