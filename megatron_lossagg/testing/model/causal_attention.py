"""Causal attention of padded rows and of packed sequences, under context parallelism too.

Megatron's own `DotProductAttention` refuses packed sequences and context parallelism, which it
leaves to Transformer Engine. This one is plain torch. It gathers all keys and values and builds
the whole mask, which costs memory and is exact in the dtype of its input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.testing.layout.token_positions import cp_positions, sequence_of_token
from megatron_lossagg.testing.model.cp_gather import GatherAndSum


class CausalAttention(torch.nn.Module):
    """The core attention of a Megatron layer: causal softmax(q k^T * scale) v.

    Communicates over the context-parallel group of Megatron's current layout. Padded rows without
    context parallelism go to Megatron's own `DotProductAttention`. It takes the arguments that
    Megatron builds a core attention with.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"CausalAttention: attention_dropout must be 0, got {dropout}; the test bench has "
                "no random numbers that agree between layouts"
            )
        self.config = config
        self.layer_number = layer_number
        self.group = parallel_state.get_context_parallel_group()
        self.softmax_scale = (
            1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        )
        self.of_rows = None
        if self.group.size() == 1:
            self.of_rows = DotProductAttention(
                config,
                layer_number,
                attn_mask_type,
                attention_type,
                attention_dropout=attention_dropout,
                softmax_scale=softmax_scale,
                **kwargs,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend from this rank's queries to the keys of all ranks.

        Args:
            query: [s/C, b, heads, head size], or [t/C, heads, head size] of packed sequences, in
                the order of `cp_positions`.
            key: as `query`, with as many groups as there are key heads.
            value: as `key`.
            attention_mask: must be None; the mask is causal.
            packed_seq_params: Megatron's `PackedSeqParams`. Tokens attend to their own sequence
                alone; a token of the padding to itself.
            **kwargs: what else Megatron passes; not used.

        Returns:
            [s/C, b, heads * head size], or [t/C, heads * head size] of packed sequences, in the
            dtype of `query`.

        Raises:
            ValueError: an attention mask.
        """
        if attention_mask is not None:
            raise ValueError("CausalAttention: expected attention_mask=None: the mask is causal")
        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            return self._attend(query, key, value, packed_seq_params).squeeze(1)
        if self.of_rows is not None:
            return self.of_rows(query, key, value, attention_mask, **kwargs)
        return self._attend(query, key, value, None)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        is_allowed = self._allowed(query.shape[0] * self.group.size(), packed).to(query.device)
        repeats = query.shape[2] // key.shape[2]
        keys, values = (
            torch.cat(GatherAndSum.apply(part, self.group)).repeat_interleave(repeats, dim=2)
            for part in (key, value)
        )
        scores = torch.einsum("sbnh,tbnh->bnst", query, keys) * self.softmax_scale
        weights = scores.masked_fill(~is_allowed, -math.inf).softmax(dim=-1)
        context = torch.einsum("bnst,tbnh->sbnh", weights, values)
        return context.reshape(*context.shape[:2], -1)

    def _allowed(self, width: int, packed: Any) -> Tensor:
        """Which keys each query of this rank may see: bool [width / C, width]."""
        cp_size, cp_rank = self.group.size(), self.group.rank()
        starts, sequences = None, torch.zeros(width, dtype=torch.int64)
        if packed is not None:
            boundaries = packed.cu_seqlens_q.tolist()
            lengths = packed.cu_seqlens_q.diff().tolist()
            padded = packed.cu_seqlens_q_padded
            starts = boundaries if padded is None else padded.tolist()
            sequences = sequence_of_token(width, starts, lengths)
        positions = [cp_positions(width, cp_size, rank, starts) for rank in range(cp_size)]
        queries, keys = positions[cp_rank], torch.cat(positions)
        is_same = sequences[queries][:, None] == sequences[keys][None, :]
        return is_same & (keys[None, :] <= queries[:, None])
