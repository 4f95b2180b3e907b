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

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lossagg.groups import all_reduce_max, all_reduce_sum
from megatron_lossagg.log_probs.shard import LogitsShard, bits_to_keep, check_tokens, split_like


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


class _FromLogits(torch.autograd.Function):
    """(log_probs,) or (log_probs, entropy) of [b, s].

    Below, z = logits / temperature. Of this rank's part of the vocabulary: m = max z, p = softmax
    of the part, so that sum exp(z - m) = 1 / max p, and mean = sum of p * (z - m). Of all of it:
    M = max of m, share = sum exp(z - M) of the part over that of all, q = share * p, and entropy
    H = log(sum exp(z - M)) - total, with total = sum over the ranks of share * (mean + m - M).
    """

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
        inside = (labels >= shard.first) & (labels < shard.end)
        column = (labels - shard.first).where(inside, 0)
        target = shard.per_token(logits.gather(-1, column.view(*logits.shape[:-1], 1)))
        local_max, max_p, mean = target.new_empty((3, len(target)))
        copy, other = shard.buffers(logits, with_entropy)
        kept = None
        if shard.backward == "keep-softmax" and logits.dtype == shard.dtype:
            kept = _empty_contiguous(logits) if ctx.needs_input_grad[0] else None
        chunks = shard.chunks(logits)
        if kept is None:
            softmax = shard.buffer(logits)
            softmaxes = tuple(softmax[: len(chunk)] for chunk in chunks)
        else:
            softmaxes = split_like(kept.view(-1, logits.shape[-1]), chunks)
        per_token = (split_like(x.unsqueeze(-1), chunks) for x in (local_max, max_p, mean))
        for chunk, p, chunk_max, chunk_max_p, chunk_mean in zip(
            chunks, softmaxes, *per_token, strict=True
        ):
            z = shard.scaled(chunk, copy)
            torch.amax(z, dim=-1, keepdim=True, out=chunk_max)
            torch.softmax(z, dim=-1, out=p)
            torch.amax(p, dim=-1, keepdim=True, out=chunk_max_p)
            if other is not None:
                shifted = torch.sub(z, chunk_max, out=other[: len(z)])
                # 0 * -inf counts 0. A NaN of the logits is in the maximum, too, and shows.
                torch.nansum(shifted.mul_(p), dim=-1, keepdim=True, out=chunk_mean)
        # A part of nothing but -inf has the softmax NaN; a sampler's mask does that to most parts.
        is_empty = local_max == -torch.inf
        global_max = local_max.clone()
        all_reduce_max(global_max, shard.group)
        sum_exp = (local_max - global_max).exp() / max_p.masked_fill(is_empty, 1)
        offset = (local_max - global_max).masked_fill(is_empty, 0)
        summands = [target.masked_fill(~inside, 0), sum_exp]
        if with_entropy:
            summands.append(sum_exp * (mean + offset))
        sums = torch.stack(summands)
        all_reduce_sum(sums, shard.group)
        log_sum_exp = sums[1].log()
        is_label = (labels >= 0) & (labels < shard.vocab_size)
        log_probs = (sums[0] - global_max - log_sum_exp).masked_fill_(~is_label, torch.nan)
        entropy = None
        if with_entropy:
            total = sums[2] / sums[1]
            offset -= total
            entropy = log_sum_exp - total
        share = sum_exp / sums[1]
        ctx.save_for_backward(
            logits, kept, column, inside, valid, is_empty, local_max, share, offset,
            log_probs, entropy,
        )  # fmt: skip
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        results = [log_probs] if entropy is None else [log_probs, entropy]
        masked = torch.zeros_like(inside) if valid is None else ~valid.reshape(-1)
        return tuple(r.masked_fill(masked, 0).view(logits.shape[:-1]) for r in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (
            logits, kept, column, inside, valid, is_empty, local_max, share, offset,
            log_probs, entropy,
        ) = ctx.saved_tensors  # fmt: skip
        shard: LogitsShard = ctx.shard
        has_entropy = len(grads) == 2 and grads[1] is not None
        grad_log_probs, grad_entropy = (
            torch.zeros_like(share) if grad is None else grad.reshape(-1) / shard.temperature
            for grad in (*grads, None)[:2]
        )
        # d log q[label] / dz = [label] - q, and dH / dz = -q * (z - M - total).
        of_p = -share * (grad_log_probs + grad_entropy * offset)
        of_shifted = -share * grad_entropy
        overwrites = shard.backward == "overwrite-logits"
        chunks = shard.chunks(logits)
        grad_logits, grad_chunks = logits.detach(), chunks
        if not overwrites:
            grad_logits = _empty_contiguous(logits) if kept is None else kept
            grad_chunks = split_like(grad_logits.view(-1, logits.shape[-1]), chunks)
        no_grad = is_empty if valid is None else is_empty | ~valid.reshape(-1)
        copy, other = shard.buffers(logits, has_entropy)
        # Straight into the gradient, if it has the dtype, and if it is not what is read.
        softmax = None
        if overwrites or logits.dtype != shard.dtype:
            softmax = shard.buffer(logits)
        selects = valid is not None or shard.vocab_size > logits.shape[-1]
        per_token = (
            split_like(x.unsqueeze(-1), chunks)
            for x in (local_max, of_p, of_shifted, bits_to_keep(~no_grad, shard.dtype))
        )
        for chunk, grad_chunk, chunk_max, factor_p, factor_shifted, bits in zip(
            chunks, grad_chunks, *per_token, strict=True
        ):
            grad = grad_chunk if softmax is None else softmax[: len(chunk)]
            if kept is None or has_entropy:
                z = shard.scaled(chunk, copy)
            if kept is None:
                torch.softmax(z, dim=-1, out=grad)
            if other is None:
                grad.mul_(factor_p)
            else:
                # Finite, so that exp(-inf) * -inf is 0, as exp is below -1e4.
                shifted = torch.sub(z, chunk_max, out=other[: len(z)]).clamp_(min=-1e4)
                grad.mul_(shifted.mul_(factor_shifted).add_(factor_p))
            if selects:
                grad.view(bits.dtype).bitwise_and_(bits)
            if softmax is not None:
                grad_chunk.copy_(grad)
        # At the label 1 - q, where q is near 1, wants expm1, and no rounding in between.
        at_label = -grad_log_probs * log_probs.expm1()
        if has_entropy:
            finite = log_probs.clamp(min=torch.finfo(shard.dtype).min)
            at_label -= grad_entropy * log_probs.exp() * (finite + entropy)
        if valid is not None:
            at_label.masked_fill_(~valid.reshape(-1), 0)
        # Not by scatter_, which on the CPU makes a float32 copy of a bfloat16 tensor.
        row, place = (torch.arange(size, device=logits.device) for size in logits.shape[:-1])
        index = row[:, None], place, column.view(logits.shape[:-1])
        at_label = at_label.where(inside, grad_logits[index].reshape(-1))
        grad_logits[index] = at_label.view(logits.shape[:-1]).to(logits.dtype)
        return grad_logits, None, None, None, None


def _empty_contiguous(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
