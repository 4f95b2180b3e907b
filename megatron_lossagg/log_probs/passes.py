"""The two passes over the logits of a rank, forward and backward, and what lies between them.

z = logits / temperature. Of this rank's part of the vocabulary, per token: m = max z, and p, the
softmax of the part. Of all of it: M = max of all m, and q, the softmax, with

    q = share * p,   share = sum exp(z - M) of the part / sum exp(z - M) of all

    log q[label] = z[label] - M - log(sum exp(z - M))
    H = log(sum exp(z - M)) - total,   total = sum of q * (z - M) over the vocabulary

    d log q[label] / dz = [label] - q          dH / dz = -q * (z - M - total)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.groups import all_reduce_max, all_reduce_sum
from megatron_lossagg.log_probs.shard import LogitsShard, bits_to_keep, split_like


class PartOfVocabulary(NamedTuple):
    """What a rank reads in its part, [b * s] each.

    Attributes:
        max: m; -inf where the part holds nothing else, as a sampler's mask makes of most parts.
        max_p: max p, which is 1 / sum exp(z - m).
        mean: sum of p * (z - m); not filled without entropy.
    """

    max: Tensor
    max_p: Tensor
    mean: Tensor


class WholeVocabulary(NamedTuple):
    """What is known of all parts, [b * s] each.

    Attributes:
        log_probs: log q[label]; NaN at a label that is not in the vocabulary.
        entropy: H, if it is wanted.
        share: what q is of p.
        offset: m - M - total, so that z - M - total is z - m and this; m - M without entropy.
    """

    log_probs: Tensor
    entropy: Tensor | None
    share: Tensor
    offset: Tensor


def read_part(
    logits: Tensor, shard: LogitsShard, kept: Tensor | None, *, with_entropy: bool
) -> PartOfVocabulary:
    """Read the logits once, a chunk at a time.

    Args:
        logits: [b, s, vocab / TP].
        shard: this rank's part.
        kept: of the shape of the logits; p is left there. None: it is dropped after each chunk.
        with_entropy: whether `mean` is wanted.

    Returns:
        What the part says of each token, [b * s]; nothing is reduced over ranks.
    """
    num_tokens = logits.shape[0] * logits.shape[1]
    part = PartOfVocabulary(*logits.new_empty((3, num_tokens), dtype=shard.dtype))
    copy, other = shard.buffers(logits, with_entropy)
    chunks = shard.chunks(logits)
    if kept is None:
        room = shard.buffer(logits)
        softmaxes = tuple(room[: len(chunk)] for chunk in chunks)
    else:
        softmaxes = split_like(kept.view(-1, logits.shape[-1]), chunks)
    per_token = (split_like(x.unsqueeze(-1), chunks) for x in part)
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
    return part


def join_parts(
    part: PartOfVocabulary,
    label_logits: Tensor,
    labels: Tensor,
    shard: LogitsShard,
    *,
    with_entropy: bool,
) -> WholeVocabulary:
    """From the parts to the whole: an all-reduce of maxima and one of sums over `shard.group`.

    Args:
        part: of this rank.
        label_logits: z[label] of each token, [b * s]; 0 where another rank has the label.
        labels: int64 [b * s].
        shard: this rank's part.
        with_entropy: whether the entropy is wanted.

    Returns:
        What all parts together say of each token, [b * s], the same on all ranks.
    """
    is_empty = part.max == -torch.inf  # has the softmax NaN
    global_max = part.max.clone()
    all_reduce_max(global_max, shard.group)
    sum_exp = (part.max - global_max).exp() / part.max_p.masked_fill(is_empty, 1)
    offset = (part.max - global_max).masked_fill(is_empty, 0)
    summands = [label_logits, sum_exp]
    if with_entropy:
        summands.append(sum_exp * (part.mean + offset))
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
    return WholeVocabulary(log_probs, entropy, sum_exp / sums[1], offset)


def write_gradient(
    logits: Tensor,
    kept: Tensor | None,
    part_max: Tensor,
    factors: tuple[Tensor, Tensor | None],
    has_gradient: Tensor | None,
    shard: LogitsShard,
) -> Tensor:
    """Write p * (a + b * (z - m)) for every word, a chunk at a time: the gradient but for labels.

    Args:
        logits: [b, s, vocab / TP].
        kept: p, left by the forward pass; the gradient is written over it. None: p is made again.
        part_max: m, [b * s].
        factors: (a, b), [b * s] each; b is None where no gradient reaches the entropy.
        has_gradient: bool [b * s]; at other tokens the gradient is 0. None: all have one.
        shard: this rank's part.

    Returns:
        [b, s, vocab / TP] in the dtype of the logits: `kept`, the memory of the logits, or new.
    """
    chunks = shard.chunks(logits)
    overwrites = shard.backward == "overwrite-logits"
    if overwrites:
        gradient, gradient_chunks = logits.detach(), chunks
    else:
        gradient = empty_contiguous(logits) if kept is None else kept
        gradient_chunks = split_like(gradient.view(-1, logits.shape[-1]), chunks)
    # Straight into the gradient, if it has the dtype, and if it is not what is read.
    is_apart = overwrites or logits.dtype != shard.dtype
    room = shard.buffer(logits) if is_apart else None
    copy, other = shard.buffers(logits, factors[1] is not None)
    kept_bits = None if has_gradient is None else bits_to_keep(has_gradient, shard.dtype)
    per_token = (
        [None] * len(chunks) if x is None else split_like(x.unsqueeze(-1), chunks)
        for x in (part_max, *factors, kept_bits)
    )
    for chunk, gradient_chunk, chunk_max, a, b, bits in zip(
        chunks, gradient_chunks, *per_token, strict=True
    ):
        p = gradient_chunk if room is None else room[: len(chunk)]
        if kept is None or other is not None:
            z = shard.scaled(chunk, copy)
        if kept is None:
            torch.softmax(z, dim=-1, out=p)
        if other is None:
            p.mul_(a)
        else:
            # Finite, so that exp(-inf) * -inf is 0, as exp is below -1e4.
            shifted = torch.sub(z, chunk_max, out=other[: len(z)]).clamp_(min=-1e4)
            p.mul_(shifted.mul_(b).add_(a))
        if bits is not None:
            p.view(bits.dtype).bitwise_and_(bits)
        if room is not None:
            gradient_chunk.copy_(p)
    return gradient


def empty_contiguous(logits: Tensor) -> Tensor:
    """Room for as many numbers."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
