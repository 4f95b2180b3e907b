"""Dense causal attention under context parallelism, in plain torch.

Megatron's own `DotProductAttention` refuses context parallelism without Transformer Engine. This
one gathers all keys and values, which costs memory and is exact in the dtype of its input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist


def zigzag_positions(seq_length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions that a context-parallel rank holds, in order, as Megatron's slicer cuts them.

    The sequence is cut in 2C pieces; rank r has pieces r and 2C-1-r, which balances causal work.

    Args:
        seq_length: full length s, a multiple of 2C.
        cp_size: context-parallel size C.
        cp_rank: r.

    Returns:
        int64 tensor [s / C].
    """
    if seq_length % (2 * cp_size):
        raise ValueError(
            f"zigzag_positions: seq_length must be a multiple of 2 * cp_size = {2 * cp_size}, "
            f"got {seq_length}; pad the sequences"
        )
    pieces = torch.arange(seq_length).chunk(2 * cp_size)
    return torch.cat([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]])


class GatherSequence(torch.autograd.Function):
    """Communicates over the group given: concatenate all ranks' chunks along dimension 0.

    Backward: the gradients of all ranks for this rank's chunk are summed (a reduce-scatter).
    """

    @staticmethod
    def forward(ctx: Any, chunk: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """[s/C, ...] on each rank -> [s, ...], in the order of the ranks."""
        ctx.group = group
        chunks = [torch.empty_like(chunk) for _ in range(group.size())]
        dist.all_gather(chunks, chunk.contiguous(), group=group)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, ...] on each rank -> [s/C, ...], summed over ranks."""
        # Not a reduce-scatter: gloo has none in older releases of torch.
        grad = grad_outputs[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class ContextParallelAttention(torch.nn.Module):
    """The core attention of a Megatron layer: causal softmax(q k^T * scale) v.

    Communicates over the context-parallel group of Megatron's current layout.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **kwargs: Any,
    ):
        """Take the arguments with which Megatron builds a core attention."""
        super().__init__()
        from megatron.core import parallel_state

        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"ContextParallelAttention: attention_dropout must be 0, got {dropout}; the test "
                "bench has no random numbers that agree between layouts"
            )
        self.config = config
        self.layer_number = layer_number
        self.group = parallel_state.get_context_parallel_group()
        head_size = config.kv_channels
        self.softmax_scale = 1 / math.sqrt(head_size) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend from this rank's queries to all keys.

        Args:
            query: [s/C, b, heads, head size], zigzag order.
            key: [s/C, b, groups, head size].
            value: as `key`.
            attention_mask: must be None; the mask is causal.
            **kwargs: what else Megatron passes; only packed sequences would change the result.

        Returns:
            [s/C, b, heads * head size], in the dtype of `query`.
        """
        if attention_mask is not None or kwargs.get("packed_seq_params") is not None:
            raise ValueError(
                "ContextParallelAttention: expected attention_mask=None and no packed_seq_params: "
                "the attention is dense and causal over the whole row"
            )
        cp_size = self.group.size()
        seq_length = query.shape[0] * cp_size
        positions = [zigzag_positions(seq_length, cp_size, rank) for rank in range(cp_size)]
        query_positions = positions[self.group.rank()].to(query.device)
        key_positions = torch.cat(positions).to(query.device)

        repeats = query.shape[2] // key.shape[2]
        keys = GatherSequence.apply(key, self.group).repeat_interleave(repeats, dim=2)
        values = GatherSequence.apply(value, self.group).repeat_interleave(repeats, dim=2)
        scores = torch.einsum("sbnh,tbnh->bnst", query, keys) * self.softmax_scale
        is_future = key_positions[None, :] > query_positions[:, None]
        weights = scores.masked_fill(is_future, -math.inf).softmax(dim=-1)
        context = torch.einsum("bnst,tbnh->sbnh", weights, values)
        return context.reshape(*context.shape[:2], -1)
