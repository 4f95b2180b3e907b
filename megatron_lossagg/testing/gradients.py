"""Put the gradient of the whole model together from the shards of all ranks, and compare two.

Replicas are not averaged: they are checked to agree, since a wrong reduction shows there first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.model.parameter_names import (
    named_parameters,
    sharded_dim,
    tensor_parallel_place,
)


@dataclass(frozen=True)
class Shard:
    """A tensor as one rank has it.

    Attributes:
        tensor: on the CPU.
        dim: dimension along which tensor parallelism splits it; None if replicated.
        tp_rank: which part this is, of those of its tensor-parallel (or expert-tensor-parallel)
            group.
        rank: global rank, for messages.
    """

    tensor: torch.Tensor
    dim: int | None
    tp_rank: int
    rank: int


def whole_model_gradient(
    chunks: list[Any], *, tolerance: float = 0.0, to_all_ranks: bool = True
) -> dict[str, torch.Tensor]:
    """Communicates over the world group: the gradient of all parameters, of all experts too.

    Read from `main_grad` of chunks in DDP, from `grad` (zero where None) of others. With Megatron's
    distributed optimizer `main_grad` is valid on the owning shard only; the shards are gathered
    over the group of their buffer, without a change to the buffer.

    Args:
        chunks: this rank's model chunks.
        tolerance: largest allowed difference between replicas (over data, context and tensor
            parallel ranks, and of shared embeddings over stages), relative to the largest entry.
            0 asks for equal numbers.
        to_all_ranks: whether every rank gets the result, or only rank 0 (others get an empty dict).

    Returns:
        global parameter name -> full tensor on the CPU.

    Raises:
        LossAggError: replicas disagree; the message names the parameter, the ranks and by how much.
    """
    gathered = {}
    for chunk in chunks:
        gathered.update(_gather_sharded_buffers(chunk))

    def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter in gathered:
            return gathered[parameter]
        gradient = getattr(parameter, "main_grad", parameter.grad)
        return torch.zeros_like(parameter) if gradient is None else gradient

    everyones = _exchange(_flatten(chunks, gradient), to_all_ranks)
    return assemble(everyones, tolerance=tolerance, what="gradient")


def whole_model_parameters(
    chunks: list[Any], *, tolerance: float = 0.0, to_all_ranks: bool = True
) -> dict[str, torch.Tensor]:
    """Communicates over the world group: the values of all parameters.

    Arguments, result and errors as for `whole_model_gradient`.
    """
    everyones = _exchange(_flatten(chunks, lambda parameter: parameter), to_all_ranks)
    return assemble(everyones, tolerance=tolerance, what="value")


def relative_error(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """L2 norm over the whole model of ``got - expected``, divided by that of ``expected``.

    Args:
        got: parameter name -> tensor.
        expected: the same names and shapes.

    Returns:
        ``||got - expected|| / ||expected||`` in float64; ``||got||`` if expected is 0 throughout;
        NaN if a tensor holds NaN.

    Raises:
        ValueError: other names or shapes.
    """
    if got.keys() != expected.keys():
        raise ValueError(
            "relative_error: the parameter names differ: only in got: "
            f"{sorted(got.keys() - expected.keys())}, only in expected: "
            f"{sorted(expected.keys() - got.keys())}"
        )
    difference = norm = 0.0
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise ValueError(
                f"relative_error: {name} has shape {tuple(got[name].shape)}, expected "
                f"{tuple(tensor.shape)}"
            )
        wide = tensor.detach().double().cpu()
        difference += (got[name].detach().double().cpu() - wide).square().sum().item()
        norm += wide.square().sum().item()
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def assemble(
    shards: Iterable[tuple[str, Shard]], *, tolerance: float = 0.0, what: str = "gradient"
) -> dict[str, torch.Tensor]:
    """Check that replicas agree and join the shards of each parameter. No communication.

    Args:
        shards: (global name, shard) of all ranks.
        tolerance: as for `whole_model_gradient`.
        what: the word for messages.

    Returns:
        global name -> whole gradient.
    """
    by_name: dict[str, dict[int, list[Shard]]] = defaultdict(lambda: defaultdict(list))
    for name, shard in shards:
        # Every tensor-parallel rank has its own part of a sharded parameter, all have the same of
        # a replicated one.
        by_name[name][shard.tp_rank if shard.dim is not None else 0].append(shard)
    whole = {}
    for name, parts in sorted(by_name.items()):
        for replicas in parts.values():
            for other in replicas[1:]:
                _check_agreement(name, replicas[0], other, tolerance, what)
        first = [parts[tp_rank][0] for tp_rank in sorted(parts)]
        dim = first[0].dim
        # Copies: a view would be pickled with everything that its rank sent.
        tensors = [part.tensor for part in first]
        whole[name] = tensors[0].clone() if dim is None else torch.cat(tensors, dim)
    return whole


@dataclass(frozen=True)
class _RankShards:
    """All shards of one rank: tensors of one dtype are one tensor, since pickling each is slow."""

    rank: int
    entries: list[tuple[str, torch.Size, int | None, int, torch.dtype]]
    flat: dict[torch.dtype, torch.Tensor]

    def shards(self) -> Iterator[tuple[str, Shard]]:
        starts = dict.fromkeys(self.flat, 0)
        for name, shape, dim, tp_rank, dtype in self.entries:
            start = starts[dtype]
            starts[dtype] += shape.numel()
            tensor = self.flat[dtype][start : starts[dtype]].view(shape)
            yield name, Shard(tensor, dim, tp_rank, self.rank)


def _flatten(
    chunks: list[Any], tensor_of: Callable[[torch.nn.Parameter], torch.Tensor]
) -> _RankShards:
    entries = []
    by_dtype = defaultdict(list)
    for chunk in chunks:
        for name, parameter in named_parameters(chunk):
            tensor = tensor_of(parameter).detach()
            tp_rank, _ = tensor_parallel_place(name)
            entries.append((name, tensor.shape, sharded_dim(parameter), tp_rank, tensor.dtype))
            by_dtype[tensor.dtype].append(tensor.reshape(-1))
    return _RankShards(
        rank=dist.get_rank(),
        entries=entries,
        flat={dtype: torch.cat(tensors).cpu() for dtype, tensors in by_dtype.items()},
    )


def _exchange(mine: _RankShards, to_all_ranks: bool) -> list[tuple[str, Shard]]:
    """Communicates over the world group: the shards of all ranks; none where none are wanted."""
    everyones: list[Any] = [None] * dist.get_world_size()
    if to_all_ranks:
        dist.all_gather_object(everyones, mine)
    elif mine.rank == 0:
        dist.gather_object(mine, everyones)
    else:
        dist.gather_object(mine)
        return []
    return [pair for rank_shards in everyones for pair in rank_shards.shards()]


def _check_agreement(name: str, one: Shard, other: Shard, tolerance: float, what: str) -> None:
    a, b = one.tensor, other.tensor
    if a.shape == b.shape:
        if torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
            return
        difference = (a - b).abs().max().item()
        largest = a.abs().max().item()
        if difference <= tolerance * largest:
            return
        by_how_much = f"by up to {difference:.3g}, with entries up to {largest:.3g}"
    else:
        by_how_much = f"in shape: {tuple(a.shape)} and {tuple(b.shape)}"
    raise LossAggError(
        f"the {what} of {name} differs between its replicas on ranks {one.rank} and {other.rank} "
        f"{by_how_much}; expected agreement to {tolerance:g}. Look for a reduction that is missing "
        "or runs over the wrong group"
    )


def _gather_sharded_buffers(chunk: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Communicates over each buffer's data-parallel group: gradients that are spread in shards."""
    ddp_config = getattr(chunk, "ddp_config", None)
    if ddp_config is None or not ddp_config.use_distributed_optimizer:
        return {}
    gradients = {}
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            flat = bucket.grad_data
            # Rank i of the group owns the i-th of equal parts.
            mine = flat.chunk(group.size())[group.rank()].contiguous()
            parts = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(parts, mine, group=group)
            full = torch.cat(parts)
            for parameter in bucket.params:
                start = parameter.main_grad.storage_offset() - flat.storage_offset()
                gradients[parameter] = full[start : start + parameter.numel()].view(parameter.shape)
    return gradients
