"""Megatron-LM: a batch for all tensor-parallel ranks, where rank 0 alone reads data.

Called by a script's own `get_batch`; that of Megatron-LM and its `broadcast_data` are not patched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.groups import communication_device

Batch = Mapping[str, Any]

_CPU = torch.device("cpu")
_MAX_DIM = 6
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def broadcast_batch(
    batch: Batch | None, fields: Sequence[str], tp_group: Any = None
) -> dict[str, Any]:
    """Give all tensor-parallel ranks the batch of rank 0: two broadcasts over `tp_group`.

    For a script whose tensor-parallel rank 0 alone reads data, with fields that Megatron-LM's
    `get_batch_on_this_tp_rank` does not know, and shapes that change. Unlike
    `megatron.core.tensor_parallel.broadcast_data` it keeps every dtype (float64 weights too), takes
    fields that are absent, and communicates over the group that is passed.

        def get_batch(data_iterator, vp_stage=None):
            batch = None if data_iterator is None else next(data_iterator)
            return slice_for_cp(broadcast_batch(batch, ("tokens", "labels", "loss_mask")))

    Args:
        batch: tensors of at most 6 dimensions; None on other ranks than the first.
        fields: the names to send, the same on every rank.
        tp_group: None takes Megatron's tensor-parallel group.

    Returns:
        {field: tensor, or None if rank 0 has none}, on the device that the group communicates on.
        Receiving ranks wait for the shapes.

    Raises:
        ValueError: rank 0 has no batch.
        TypeError: rank 0 has a field that is not such a tensor.
    """
    if tp_group is None:
        from megatron.core import parallel_state

        tp_group = parallel_state.get_tensor_model_parallel_group()
    source = dist.get_process_group_ranks(tp_group)[0]
    is_source = tp_group.rank() == 0
    device = communication_device(tp_group, _device_of(batch, fields) if is_source else _CPU)
    sent: dict[str, Tensor | None] = dict.fromkeys(fields)
    header = torch.full((len(fields), 2 + _MAX_DIM), -1, dtype=torch.int64)
    if is_source:
        sent = {field: _to_send(batch, field, device) for field in fields}
        for row, tensor in zip(header, sent.values(), strict=True):
            if tensor is not None:
                row[0], row[1] = _DTYPES.index(tensor.dtype), tensor.dim()
                row[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape)
    if tp_group.size() == 1:
        return dict(sent)
    header = header.to(device)
    dist.broadcast(header, source, group=tp_group)
    if not is_source:
        for field, (code, num_dims, *shape) in zip(fields, header.tolist(), strict=True):
            if code >= 0:
                sent[field] = torch.empty(shape[:num_dims], dtype=_DTYPES[code], device=device)
    # All fields in one message, as bytes.
    tensors = [tensor for tensor in sent.values() if tensor is not None]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    pieces = message.split(sizes)
    if is_source:
        for piece, tensor in zip(pieces, tensors, strict=True):
            piece.copy_(tensor.reshape(-1).view(torch.uint8))
    dist.broadcast(message, source, group=tp_group)
    if not is_source:
        for piece, tensor in zip(pieces, tensors, strict=True):
            tensor.view(-1).view(torch.uint8).copy_(piece)
    return dict(sent)


def _device_of(batch: Batch | None, fields: Sequence[str]) -> torch.device:
    tensors = [] if batch is None else [batch.get(field) for field in fields]
    return next((t.device for t in tensors if isinstance(t, Tensor)), _CPU)


def _to_send(batch: Batch | None, field: str, device: torch.device) -> Tensor | None:
    if batch is None:
        raise ValueError("broadcast_batch got no batch on tensor-parallel rank 0, which sends it.")
    tensor = batch.get(field)
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIM:
        found = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, Tensor)
            else (type(tensor).__name__)
        )
        raise TypeError(
            f"broadcast_batch cannot send {field!r}, a {found}: expected a real tensor of at most "
            f"{_MAX_DIM} dimensions."
        )
    return tensor.to(device, non_blocking=True).contiguous()
