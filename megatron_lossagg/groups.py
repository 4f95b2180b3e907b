"""The process groups a loss needs, and the few collectives on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import LossAggError


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _rank(group: Any) -> int:
    return 0 if group is None else int(group.rank())


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of this rank; None stands for a group of this process alone, never for WORLD.

    Attributes:
        dp: ranks that hold *different data* (without context parallelism): the group of the counts.
        cp: ranks that hold other parts of the same sequences.
        dp_cp: the product of both, over which DDP reduces gradients.
        pp: the pipeline stages of this rank's model replica, in order.
        tp: the tensor-parallel ranks.
        num_virtual_stages: model chunks per pipeline rank (1 without an interleaved schedule).
        tp_dp_cp: all ranks of this rank's pipeline stage, on the last one all that see a loss; None
            where it is not known.
    """

    dp: Any = None
    cp: Any = None
    dp_cp: Any = None
    pp: Any = None
    tp: Any = None
    num_virtual_stages: int = 1
    tp_dp_cp: Any = None

    def __post_init__(self) -> None:
        if self.dp_size * self.cp_size != self.dp_cp_size:
            raise LossAggError(
                f"Inconsistent groups: dp has {self.dp_size} ranks and cp {self.cp_size}, but "
                f"dp_cp has {self.dp_cp_size}; expected {self.dp_size * self.cp_size}. Pass the "
                "data-parallel group without context parallelism as `dp` and the one with it as "
                "`dp_cp`."
            )

    @classmethod
    def from_megatron(cls, pg_collection: Any = None) -> ParallelGroups:
        """Groups of an initialised Megatron-Core. Does not communicate.

        Args:
            pg_collection: a `ProcessGroupCollection` with dp, cp, dp_cp, pp and tp, and tp_dp_cp
                if it has one; None reads `megatron.core.parallel_state`.

        Returns:
            The groups of this rank.

        Raises:
            LossAggError: Megatron's model parallelism is not initialised, or a field is missing.
        """
        from megatron.core import parallel_state

        if pg_collection is None:
            if not parallel_state.model_parallel_is_initialized():
                raise LossAggError(
                    "Megatron's parallel state is not initialised. Call "
                    "megatron.core.parallel_state.initialize_model_parallel(...) first, pass "
                    "groups=ParallelGroups.from_megatron(pg_collection), or, in one process "
                    "without Megatron's groups, groups=ParallelGroups.single_process()."
                )
            return cls(
                dp=parallel_state.get_data_parallel_group(with_context_parallel=False),
                cp=parallel_state.get_context_parallel_group(),
                dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
                pp=parallel_state.get_pipeline_model_parallel_group(),
                tp=parallel_state.get_tensor_model_parallel_group(),
                num_virtual_stages=(
                    parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
                ),
                tp_dp_cp=parallel_state.get_tensor_and_data_parallel_group(
                    with_context_parallel=True
                ),
            )
        # An unset field raises in some releases and is None in others.
        found = {
            name: getattr(pg_collection, name, None) for name in ("dp", "cp", "dp_cp", "pp", "tp")
        }
        missing = [name for name, group in found.items() if group is None]
        if missing:
            raise LossAggError(
                f"pg_collection lacks {', '.join(missing)}; the loss needs dp, cp, dp_cp, pp and "
                "tp. Set them (a group of one rank where a dimension is not used): a missing group "
                "would silently mean the whole world."
            )
        return cls(
            **found,
            num_virtual_stages=(
                parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
            ),
            tp_dp_cp=getattr(pg_collection, "tp_dp_cp", None),
        )

    @classmethod
    def single_process(cls) -> ParallelGroups:
        """No parallelism: this process holds the whole global batch and the whole model."""
        return cls()

    @property
    def is_of_megatron(self) -> bool:
        """Whether there is any process group, as in every job of Megatron."""
        return any(g is not None for g in (self.dp, self.cp, self.dp_cp, self.pp, self.tp))

    @cached_property
    def dp_size(self) -> int:
        """D, the number of ranks that hold different data."""
        return _size(self.dp)

    @cached_property
    def cp_size(self) -> int:
        """C, the context-parallel size."""
        return _size(self.cp)

    @cached_property
    def dp_cp_size(self) -> int:
        """D * C, the ranks DDP reduces over."""
        return _size(self.dp_cp)

    @cached_property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return _size(self.pp)

    @cached_property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return _size(self.tp)

    @cached_property
    def cp_rank(self) -> int:
        """This rank's place in `cp`."""
        return _rank(self.cp)

    @cached_property
    def tp_rank(self) -> int:
        """This rank's place in `tp`."""
        return _rank(self.tp)

    @cached_property
    def pp_rank(self) -> int:
        """This rank's place in `pp`."""
        return _rank(self.pp)

    @cached_property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where the loss is computed."""
        return _rank(self.pp) == self.pp_size - 1


def current_groups(groups: ParallelGroups | None) -> ParallelGroups:
    """The groups that were passed, or Megatron's of this moment."""
    return ParallelGroups.from_megatron() if groups is None else groups


def communication_device(group: Any, fallback: torch.device) -> torch.device:
    """The device whose tensors `group` can reduce: the current GPU under NCCL, else `fallback`."""
    if group is not None and dist.get_backend(group) == "nccl" and fallback.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return fallback


def all_reduce_sum(tensor: Tensor, group: Any, *, async_op: bool = False) -> Any:
    """Sum `tensor` in place over `group` (communicates over the group that is passed).

    A group of one rank, or None, needs no communication. Returns the pending work with
    `async_op=True`, else None.
    """
    if _size(group) == 1:
        return None
    return dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def all_reduce_max(tensor: Tensor, group: Any) -> None:
    """Maximum of `tensor` over `group`, in place (communicates over the group that is passed)."""
    if _size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def all_reduce_extremes(largest: Tensor, group: Any) -> Tensor:
    """Maxima over `group`, where a NaN of any rank stays one (communicates over the group).

    Backends do not agree on the maximum of NaN and a number, so NaN travels beside the numbers.
    """
    is_nan = torch.isnan(largest)
    pairs = torch.cat([largest.masked_fill(is_nan, -torch.inf), is_nan.to(largest.dtype)])
    all_reduce_max(pairs, group)
    values, had_nan = pairs.chunk(2)
    return values.masked_fill(had_nan > 0, torch.nan)


def broadcast_from_last(tensor: Tensor, group: Any) -> None:
    """Overwrite `tensor` by the last rank's (communicates over the group that is passed)."""
    if _size(group) > 1:
        dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[-1], group=group)


def broadcast_from_first(tensor: Tensor, group: Any) -> None:
    """Overwrite `tensor` by the first rank's (communicates over the group that is passed)."""
    if _size(group) > 1:
        dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
