"""Log-probabilities and entropy of tokens from vocab-parallel logits, in chunks of tokens.

Megatron-Core's own function, `vocab_parallel_cross_entropy`, gives log-probabilities alone, keeps a
float32 softmax of all tokens for the backward pass, overwrites logits that are float32, and takes
float64 down to float32. Here the softmax is made for one chunk of tokens at a time, dropped, and
made again in the backward pass. What is made of it stays in the cache, and its steps, in Megatron
passes over all logits, are one operator of torch: making it twice takes about as long as Megatron's
once, with the entropy about a quarter longer (benchmarks/README.md). The collectives are on numbers
per token: one maximum and one packed sum, for all chunks together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lossagg.log_probs.passes import (
    empty_contiguous,
    join_parts,
    read_part,
    write_gradient,
)
from megatron_lossagg.log_probs.shard import LogitsShard, check_tokens


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None = None,
    *,
    tp_group: Any = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    backward: str = "recompute",
) -> Tensor:
    """Log-probability of every label. Two all-reduces over `tp_group`, none in the backward pass.

        log p_t = z_t[label_t] - log(sum over the vocabulary of exp(z_t)),  z = logits / temperature

    One all-reduce takes the maximum, [b * s]; one sums two numbers per token, [2, b * s].

    Memory, with t = b * s tokens and v = vocab / TP: besides the logits [t, v] a float32 chunk
    [chunk_size, v] (two, where the logits are neither float32 nor float64 or the temperature is not
    1), and in the backward pass the gradient, [t, v] in the dtype of the logits.

    Args:
        logits: [b, s, vocab / TP], or packed [1, t, vocab / TP]: what a `GPTModel` without `labels`
            returns. Any floating dtype. Not changed, unless `backward` says so.
        labels: int [b, s], already shifted: the token that follows. Indices into the whole
            vocabulary.
        loss_mask: [b, s], non-zero at valid tokens; None: all are. At masked positions logits may
            be NaN or inf and labels anything, such as -100.
        tp_group: the ranks that hold the other parts of the vocabulary; None: Megatron's
            tensor-parallel group, or this process alone if it has no `torch.distributed` groups.
        temperature: what the logits are divided by: that of sampling, for the log-probabilities of
            the distribution that was sampled from.
        chunk_size: tokens in a chunk. Changes no result. None: on the CPU what takes 4 MiB, which
            stays in the cache; else so many that two chunks take a sixteenth of the logits' memory,
            within 64 and 1024.
        backward: "recompute": the softmax is made again from the logits. "keep-softmax": it is kept
            from the forward pass on, in the memory of the gradient, so that there is no second exp,
            a third of the time; for one backward pass, and logits of float32 or float64 (others are
            recomputed). "overwrite-logits": recompute, and write the gradient over the logits
            instead of into a tensor of its own, for logits that nothing else reads. With both,
            autograd raises if another backward pass needs what is gone.

    Returns:
        [b, s], in nats, float32 (float64 for float64 logits), the same on all ranks of `tp_group`;
        exactly 0 at masked positions, with a gradient of exactly 0. Nothing is reduced over tokens.

    Raises:
        TypeError: an argument that is no plain tensor or number, or labels that are no integers.
        ValueError: shapes that differ, an option out of range, or a valid token's label that is
            not in the vocabulary. On a GPU, where looking would be a host synchronisation, that
            token's log-probability is NaN instead.
        LossAggError: no `tp_group`, and Megatron's is not initialised.

    Source: Megatron-Core, `megatron/core/tensor_parallel/cross_entropy.py`. As verl's
    `vocab_parallel_log_probs_from_logits` and NeMo-RL's `ChunkedDistributedLogprob`.
    """
    shard = LogitsShard.of(logits, tp_group, temperature, chunk_size, backward)
    valid = check_tokens(logits, labels, loss_mask, shard.vocab_size)
    return _FromLogits.apply(logits, labels, valid, shard, False)[0]


def log_probs_and_entropy_from_logits(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None = None,
    *,
    tp_group: Any = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    backward: str = "recompute",
) -> tuple[Tensor, Tensor]:
    """Log-probability of every label, and entropy. Two all-reduces over `tp_group`, none backward.

    Log-probabilities as by `log_probs_from_logits`, and, with p = softmax(logits / temperature):

        H_t = -sum over the vocabulary of p_t * log p_t

    The second all-reduce carries one more number per token. A logit of -inf counts 0. Both results
    have exact gradients, which share one tensor [t, v]; two functions, called one after the other,
    would make two. Where no gradient reaches the entropy, it costs nothing in the backward pass.

    There are always two float32 chunks.

    Args:
        logits: [b, s, vocab / TP], or packed [1, t, vocab / TP]; this and all else as
            `log_probs_from_logits` takes it.
        labels: int [b, s], already shifted.
        loss_mask: [b, s], non-zero at valid tokens; None: all are.
        tp_group: the ranks that hold the other parts of the vocabulary.
        temperature: what the logits are divided by.
        chunk_size: tokens in a chunk. Changes no result.
        backward: "recompute", "keep-softmax" or "overwrite-logits".

    Returns:
        (log_probs, entropy), each [b, s] as `log_probs_from_logits` returns it, in nats.

    Raises:
        TypeError: as `log_probs_from_logits`.
        ValueError: as `log_probs_from_logits`.
        LossAggError: no `tp_group`, and Megatron's is not initialised.

    Source: Shannon's entropy. As verl's `vocab_parallel_entropy`.
    """
    shard = LogitsShard.of(logits, tp_group, temperature, chunk_size, backward)
    valid = check_tokens(logits, labels, loss_mask, shard.vocab_size)
    log_probs, entropy = _FromLogits.apply(logits, labels, valid, shard, True)
    return log_probs, entropy


class _Saved(NamedTuple):
    """What the backward pass needs; the formulas in `passes` tell what is what, [b * s] each.

    Attributes:
        logits: [b, s, vocab / TP].
        kept: the softmax p of the part, of that shape, or None: it is made again.
        column: where in this part the label is, int64.
        is_here: whether it is in this part, bool.
        valid: bool [b, s], or None: all are.
        part_max: m.
        share: of `WholeVocabulary`, as are the others.
        offset: m - M - total.
        log_probs: not masked.
        entropy: not masked, or None.
    """

    logits: Tensor
    kept: Tensor | None
    column: Tensor
    is_here: Tensor
    valid: Tensor | None
    part_max: Tensor
    share: Tensor
    offset: Tensor
    log_probs: Tensor
    entropy: Tensor | None


class _FromLogits(torch.autograd.Function):
    """(log_probs,) or (log_probs, entropy) of [b, s]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        valid: Tensor | None,
        shard: LogitsShard,
        with_entropy: bool,
    ) -> tuple[Tensor, ...]:
        labels = labels.reshape(-1).long()
        column, is_here = shard.find(labels)
        label_logits = shard.per_token(logits.gather(-1, column.view(*logits.shape[:-1], 1)))
        keeps = shard.backward == "keep-softmax" and logits.dtype == shard.dtype
        kept = empty_contiguous(logits) if keeps and ctx.needs_input_grad[0] else None
        part = read_part(logits, shard, kept, with_entropy=with_entropy)
        label_logits.masked_fill_(~is_here, 0)
        whole = join_parts(part, label_logits, labels, shard, with_entropy=with_entropy)
        ctx.save_for_backward(
            *_Saved(
                logits, kept, column, is_here, valid, part.max, whole.share, whole.offset,
                whole.log_probs, whole.entropy,
            )
        )  # fmt: skip
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        results = [whole.log_probs] if whole.entropy is None else [whole.log_probs, whole.entropy]
        masked = torch.zeros_like(is_here) if valid is None else ~valid.reshape(-1)
        return tuple(result.masked_fill(masked, 0).view(logits.shape[:-1]) for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, shard = _Saved(*ctx.saved_tensors), ctx.shard
        has_entropy = len(grads) == 2 and grads[1] is not None
        of_log_probs, of_entropy = (
            torch.zeros_like(saved.share) if grad is None else grad.reshape(-1) / shard.temperature
            for grad in (*grads, None)[:2]
        )
        of_p = -saved.share * (of_log_probs + of_entropy * saved.offset)
        of_shifted = -saved.share * of_entropy if has_entropy else None
        grad_logits = write_gradient(
            saved.logits,
            saved.kept,
            saved.part_max,
            (of_p, of_shifted),
            _tokens_with_gradient(saved, shard),
            shard,
        )
        at_label = _gradient_at_label(saved, of_log_probs, of_entropy if has_entropy else None)
        _write_at_labels(grad_logits, at_label, saved)
        return grad_logits, None, None, None, None


def _tokens_with_gradient(saved: _Saved, shard: LogitsShard) -> Tensor | None:
    """Bool [b * s], or None: all have one. A part of nothing but -inf has none, as its p is NaN."""
    has_other_parts = shard.vocab_size > saved.logits.shape[-1]
    if saved.valid is None and not has_other_parts:
        return None
    has_words = saved.part_max != -torch.inf
    return has_words if saved.valid is None else has_words & saved.valid.reshape(-1)


def _gradient_at_label(saved: _Saved, of_log_probs: Tensor, of_entropy: Tensor | None) -> Tensor:
    """The gradient of each token's own label, [b * s].

    1 - q, where q is near 1, wants expm1, and no rounding in between.
    """
    found = -of_log_probs * saved.log_probs.expm1()
    if of_entropy is not None:
        assert saved.entropy is not None
        finite = saved.log_probs.clamp(min=torch.finfo(saved.log_probs.dtype).min)
        found -= of_entropy * saved.log_probs.exp() * (finite + saved.entropy)
    if saved.valid is not None:
        found.masked_fill_(~saved.valid.reshape(-1), 0)
    return found


def _write_at_labels(grad_logits: Tensor, at_label: Tensor, saved: _Saved) -> None:
    """In place, where this rank has the label."""
    # Not by scatter_, which on the CPU makes a float32 copy of a bfloat16 tensor.
    tokens = grad_logits.shape[:-1]
    row, place = (torch.arange(size, device=grad_logits.device) for size in tokens)
    index = row[:, None], place, saved.column.view(tokens)
    values = at_label.where(saved.is_here, grad_logits[index].reshape(-1))
    grad_logits[index] = values.view(tokens).to(grad_logits.dtype)
