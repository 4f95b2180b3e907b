"""This rank's part of vocab-parallel logits: which words it has, and how it is read in chunks.

Throughout, z = logits / temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.plain_tensors import check_plain_tensor

BACKWARDS = ("recompute", "keep-softmax", "overwrite-logits")


@dataclass(frozen=True)
class LogitsShard:
    """Which part of the vocabulary a rank has, and how its logits are read.

    Attributes:
        group: the ranks that hold the parts; None: this process holds the whole.
        first: the first word of this part.
        end: the word after its last.
        vocab_size: words of all parts.
        dtype: what is computed in: that of the logits, at least float32.
        temperature: what logits are divided by.
        chunk_size: tokens that are read at a time.
        backward: one of `BACKWARDS`.
    """

    group: Any
    first: int
    end: int
    vocab_size: int
    dtype: torch.dtype
    temperature: float
    chunk_size: int
    backward: str

    @classmethod
    def of(
        cls,
        logits: Any,
        tp_group: Any,
        temperature: float,
        chunk_size: int | None,
        backward: str,
    ) -> LogitsShard:
        """Check what `log_probs_from_logits` was given. Does not communicate."""
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            what = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"logits must be a floating-point tensor, got {what}.")
        check_plain_tensor(logits, "logits", "[b, s, vocab / TP]")
        if logits.dim() != 3 or logits.shape[-1] == 0:
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}; expected [b, s, vocab / TP], or packed "
                "[1, t, vocab / TP]: add a missing dimension with unsqueeze(0)."
            )
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
            raise TypeError(f"temperature must be a number, got {type(temperature).__name__}.")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}.")
        if backward not in BACKWARDS:
            raise ValueError(f"Unknown backward {backward!r}; expected {', '.join(BACKWARDS)}.")
        if chunk_size is None:
            chunk_size = _default_chunk_size(logits)
        elif isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size must be None or an int above 0, got {chunk_size!r}.")
        if tp_group is None and dist.is_available() and dist.is_initialized():
            tp_group = ParallelGroups.from_megatron().tp
        size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
        width = logits.shape[-1]
        return cls(
            group=tp_group,
            first=rank * width,
            end=(rank + 1) * width,
            vocab_size=size * width,
            dtype=_wide(logits.dtype),
            temperature=float(temperature),
            chunk_size=chunk_size,
            backward=backward,
        )

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(where each label is in this part, int64; whether it is there at all, else that is 0)."""
        is_here = (labels >= self.first) & (labels < self.end)
        return (labels - self.first).where(is_here, 0), is_here

    def chunks(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Views of the logits of all b * s tokens in their order, [n, vocab / TP] each."""
        # Rows that cannot be joined without a copy, such as logits[:, :-1], are read one by one.
        rows = [logits.view(-1, logits.shape[-1])] if logits.is_contiguous() else logits
        return tuple(chunk for row in rows for chunk in row.split(self.chunk_size))

    def buffer(self, logits: Tensor) -> Tensor:
        """Room for one chunk in `dtype`."""
        rows = min(self.chunk_size, logits.shape[0] * logits.shape[1])
        return logits.new_empty((rows, logits.shape[-1]), dtype=self.dtype)

    def buffers(self, logits: Tensor, with_entropy: bool) -> tuple[Tensor | None, Tensor | None]:
        """(room for what `scaled` copies, room for z - max z): None if not needed, or the same."""
        needs_copy = self.temperature != 1 or logits.dtype != self.dtype
        copy = self.buffer(logits) if needs_copy else None
        if not with_entropy:
            return copy, None
        return copy, self.buffer(logits) if copy is None else copy

    def scaled(self, chunk: Tensor, copy: Tensor | None) -> Tensor:
        """The z of a chunk in `dtype`: in the first rows of `copy`, or the chunk itself."""
        if copy is None:
            return chunk
        return self._divided(copy[: len(chunk)].copy_(chunk))

    def per_token(self, logits: Tensor) -> Tensor:
        """The z of one logit per token, in `dtype`: a new tensor [b * s]."""
        return self._divided(logits.reshape(-1).to(self.dtype))

    def _divided(self, z: Tensor) -> Tensor:
        return z if self.temperature == 1 else z.div_(self.temperature)


def check_tokens(logits: Tensor, labels: Any, loss_mask: Any, vocab_size: int) -> Tensor | None:
    """The valid positions as bool [b, s], or None for all. Looks at values on the CPU only.

    Args:
        logits: [b, s, vocab / TP].
        labels: int [b, s].
        loss_mask: [b, s], non-zero at valid tokens; None: all are.
        vocab_size: of the whole vocabulary.

    Returns:
        bool [b, s], or None.

    Raises:
        TypeError: labels that are no integers, or an argument that is no plain tensor.
        ValueError: another shape, or (on the CPU) a label outside the vocabulary.
    """
    named = {"labels": labels} if loss_mask is None else {"labels": labels, "loss_mask": loss_mask}
    for name, value in named.items():
        check_plain_tensor(value, name, "[b, s]")
        if value.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but logits {tuple(logits.shape)}; "
                f"expected {tuple(logits.shape[:-1])}, one value per token. The batch comes first, "
                "as in what GPTModel returns."
            )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must hold integers, got {labels.dtype}.")
    valid = None if loss_mask is None else loss_mask != 0
    if labels.device.type == "cpu":
        outside = (labels < 0) | (labels >= vocab_size)
        if valid is not None:
            outside &= valid
        if outside.any():
            raise ValueError(
                f"{int(outside.sum())} labels of valid tokens are outside the vocabulary of "
                f"{vocab_size}, such as {int(labels[outside][0])}. Pass a loss_mask that is 0 "
                "where labels only fill up, and check that tp_group is the one of the logits."
            )
    return valid


def split_like(tokens: Tensor, chunks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parts of a tensor of b * s tokens that belong to the chunks: views."""
    return tokens.split([len(chunk) for chunk in chunks])


def bits_to_keep(is_kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers as wide as `dtype`: all bits where kept, else none.

    A bitwise "and" with them selects, NaN or not. So do `masked_fill_` and `where`, but broadcast
    over the vocabulary those take nearly as long as exp on the CPU.
    """
    return -is_kept.to(torch.int64 if dtype.itemsize == 8 else torch.int32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _default_chunk_size(logits: Tensor) -> int:
    tokens = logits.shape[0] * logits.shape[1]
    bytes_per_token = logits.shape[-1] * _wide(logits.dtype).itemsize
    # So many that two chunks take a sixteenth of the logits' memory, within limits.
    size = tokens * logits.shape[-1] * logits.dtype.itemsize // (16 * 2 * bytes_per_token)
    if logits.device.type != "cpu":
        return max(64, min(1024, size))
    in_cache = max(8, 2**22 // bytes_per_token)
    return min(in_cache, max(32, size))
