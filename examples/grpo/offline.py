"""Batches of recorded responses: a JSONL file, byte-level tokens, advantages within each prompt."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.advantages import group_advantages
from grpo.batch import Batch
from grpo.config import DataConfig, OfflineConfig
from grpo.log_probs import token_log_probs
from grpo.trainer import Trainer

# Bytes are tokens 0..255.
EOS, PAD, SEPARATOR = 256, 257, 258
# The next multiple of 16: it splits evenly over tensor-parallel ranks.
VOCAB_SIZE = 272


@dataclass(frozen=True)
class Record:
    """One recorded response."""

    prompt_id: str
    prompt: str
    response: str
    reward: float


def read_records(path: Path) -> list[Record]:
    """Read a file with one JSON object a line; keys that are not of `Record` are left alone.

    Raises:
        ValueError: the file cannot be read or is empty, or a line is not a response; the message
            begins with file:line.
    """
    records: list[Record] = []
    prompts: dict[str, tuple[str, int]] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = _read_record(line)
                    prompt, first = prompts.setdefault(record.prompt_id, (record.prompt, number))
                    if prompt != record.prompt:
                        raise ValueError(
                            f"prompt_id {record.prompt_id} has another prompt than on line "
                            f"{first}; responses with one prompt_id must answer one prompt"
                        )
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}.") from error
                records.append(record)
    except OSError as error:
        raise ValueError(f"Cannot read {path}: {error.strerror}.") from error
    if not records:
        raise ValueError(f"{path} has no responses in it.")
    return records


_KINDS: dict[str, tuple[type, ...]] = {
    "prompt_id": (str, int),
    "prompt": (str,),
    "response": (str,),
    "reward": (int, float),
}


def _read_record(line: bytes) -> Record:
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {_shown(values)}")
    for key, kinds in _KINDS.items():
        if key not in values:
            raise ValueError(f"has no {key!r}; its keys are {', '.join(values) or '(none)'}")
        if not isinstance(values[key], kinds):
            kind = {"reward": "a number", "prompt_id": "a number or text"}.get(key, "text")
            raise ValueError(f"{key!r} must be {kind}, got {_shown(values[key])}")
    if not math.isfinite(values["reward"]):
        raise ValueError(f"'reward' must be a finite number, got {values['reward']}")
    return Record(
        prompt_id=str(values["prompt_id"]),
        prompt=values["prompt"],
        response=values["response"],
        reward=float(values["reward"]),
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(frozen=True)
class EncodedResponse:
    """A response as tokens.

    Attributes:
        tokens: int64 [length]: the end of the prompt, SEPARATOR, response, EOS.
        prompt_length: how many of them come before the response.
        prompt_is_cut: the prompt lost its beginning.
        response_is_cut: the response lost its end, and has no EOS.
    """

    tokens: Tensor
    prompt_length: int
    prompt_is_cut: bool
    response_is_cut: bool


def encode(record: Record, config: DataConfig) -> EncodedResponse:
    """Bytes as tokens, cut to `config.sequence_length`."""
    prompt = list(record.prompt.encode("utf-8", "surrogatepass"))
    response = list(record.response.encode("utf-8", "surrogatepass"))
    head = [*prompt[-config.max_prompt_length :], SEPARATOR]
    tokens = [*head, *response, EOS]
    return EncodedResponse(
        tokens=torch.tensor(tokens[: config.sequence_length]),
        prompt_length=len(head),
        prompt_is_cut=len(prompt) > config.max_prompt_length,
        response_is_cut=len(tokens) > config.sequence_length,
    )


class OfflineBatches:
    """Deals recorded responses into batches, in an order that the seed and the step decide.

    Prompts are shuffled and their responses stay together, so that the advantages of a batch are
    balanced. They compare a response with all others to its prompt in the file, also where a group
    straddles two batches. Old log-probabilities are those of the model before training.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, config: OfflineConfig, records: list[Record]) -> None:
        self._config = config
        pieces = 2 * config.layout.cp if config.layout.cp > 1 else 1
        width = config.data.sequence_length - 1
        self.row_width = width + -width % pieces
        self._encoded = [encode(record, config.data) for record in records]
        self._rewards = torch.tensor([record.reward for record in records])
        groups: dict[str, list[int]] = {}
        for index, record in enumerate(records):
            groups.setdefault(record.prompt_id, []).append(index)
        self._groups = list(groups.values())
        group_ids = torch.zeros(len(records), dtype=torch.long)
        for number, members in enumerate(self._groups):
            group_ids[members] = number
        self._advantages = group_advantages(
            self._rewards,
            group_ids,
            normalize_by_std=config.algorithm.normalize_by_std,
        )

    def describe(self) -> str:
        """One line on the data: how much there is, how much was cut, how much has a signal."""
        total = len(self._encoded)
        cut = sum(e.response_is_cut for e in self._encoded)
        prompts_cut = sum(e.prompt_is_cut for e in self._encoded)
        informative = int((self._advantages != 0).sum())
        length = self._config.data.sequence_length
        return (
            f"{total:,} responses to {len(self._groups):,} prompts, mean reward "
            f"{self._rewards.mean():.3f}; {cut:,} responses ({cut / total:.1%}) are cut to fit "
            f"rows of {length:,} bytes, {prompts_cut:,} have a prompt cut to its last "
            f"{self._config.data.max_prompt_length:,}; {informative:,} have an advantage that is "
            "not 0"
        )

    def batch(self, step: int, trainer: Trainer) -> Batch:
        """This replica's part of a step's batch. Communicates over tp, cp and pp."""
        size = self._config.sequences_per_step
        rows = list(self._order(first=(step - 1) * size, number=size))
        dp_size, dp_rank = trainer.groups.dp_size, trainer.groups.dp.rank()
        own = torch.tensor(rows).chunk(dp_size)[dp_rank]
        tokens = torch.full((len(own), self.row_width + 1), PAD)
        loss_mask = torch.zeros(len(own), self.row_width, dtype=torch.bool)
        for row, index in enumerate(own.tolist()):
            encoded = self._encoded[index]
            end = len(encoded.tokens)
            tokens[row, :end] = encoded.tokens
            loss_mask[row, encoded.prompt_length - 1 : end - 1] = True
        tokens = tokens.to(trainer.device)
        with trainer.initial_weights.in_force():
            old_log_probs = token_log_probs(
                trainer.chunks, tokens, trainer.groups, trainer.num_microbatches
            )
        return Batch(
            tokens=tokens,
            loss_mask=loss_mask.to(trainer.device),
            rewards=self._rewards[own].to(trainer.device),
            advantages=self._advantages[own].to(trainer.device),
            old_log_probs=old_log_probs,
            ref_log_probs=old_log_probs,
        )

    def _order(self, first: int, number: int) -> Iterator[int]:
        """Places `first` and on in an endless sequence of shuffled passes over the file."""
        total = len(self._encoded)
        epoch, shuffled = -1, []
        for place in range(first, first + number):
            if place // total != epoch:
                epoch = place // total
                groups = list(self._groups)
                random.Random(f"{self._config.seed}/{epoch}").shuffle(groups)
                shuffled = [index for group in groups for index in group]
            yield shuffled[place % total]
