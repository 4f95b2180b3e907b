"""Megatron's process groups for a `Layout`, on whatever this process runs in.

That may be a rank of a `RankPool`, a plain script (one rank), or a process that torchrun started.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.ranks.device_shim import install_cpu_shim

_SEED = 1234
# A layout holds some 20 groups, and a gloo group holds sockets and a thread that wakes a hundred
# times a second: keep two layouts, one to run and one for its reference, not all.
_MAX_KEPT_LAYOUTS = 2


@dataclass
class _KeptLayout:
    """Megatron's global state for one layout, and whatever was built on its groups."""

    state: dict[str, Any]
    objects: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Kept:
    """The kept layouts, oldest first, of one default process group."""

    world: Any = None
    current: Layout | None = None
    layouts: OrderedDict[Layout, _KeptLayout] = field(default_factory=OrderedDict)


_kept = _Kept()


def initialize_model_parallel(layout: Layout) -> None:
    """Communicates over the world group: make Megatron's groups for `layout` the current ones.

    Without a default process group, one is started: from torchrun's environment if it is there
    (NCCL with CUDA, else gloo), otherwise with this process as the only rank. On a machine without
    CUDA the CPU shim is installed. The model-parallel seeds are set anew at each call.

    Groups of the last few layouts are kept, so that going back to one costs nothing; all ranks must
    therefore ask for the same layouts in the same order.

    Args:
        layout: its world size must be that of the default process group.

    Raises:
        LossAggError: the number of ranks is not the layout's.
    """
    install_cpu_shim()
    _initialize_default_group(layout)
    _forget_another_world()
    # Only now: its import takes seconds, and the number of ranks may be wrong.
    from megatron.core import parallel_state, tensor_parallel

    groups_layout = replace(layout, num_microbatches=layout.pp, sequence_parallel=False)
    if not _is_in_force(parallel_state, groups_layout):
        _put_aside(parallel_state)
        if groups_layout in _kept.layouts:
            vars(parallel_state).update(_kept.layouts[groups_layout].state)
        else:
            _initialize_groups(parallel_state, groups_layout)
            _kept.layouts[groups_layout] = _KeptLayout(_state(parallel_state))
        _kept.layouts.move_to_end(groups_layout)
        _kept.current = groups_layout
        while len(_kept.layouts) > _MAX_KEPT_LAYOUTS:
            _destroy(_kept.layouts.popitem(last=False)[1])
    torch.manual_seed(_SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED)


def destroy_model_parallel() -> None:
    """Destroy the groups of all kept layouts; the default process group stays."""
    from megatron.core import parallel_state

    _forget_another_world()
    _put_aside(parallel_state)
    while _kept.layouts:
        _destroy(_kept.layouts.popitem()[1])


def objects_of_current_layout() -> dict[Any, Any]:
    """A cache that lives as long as the groups of the current layout, for models built on them."""
    if _kept.current is None:
        raise LossAggError("no layout is current: call initialize_model_parallel(layout) first")
    return _kept.layouts[_kept.current].objects


def current_device() -> torch.device:
    """The device on which Megatron allocates: this rank's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _initialize_default_group(layout: Layout) -> None:
    from_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not dist.is_initialized():
        world_size = int(os.environ["WORLD_SIZE"]) if from_torchrun else 1
        _check_world_size(layout, world_size)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if from_torchrun:
            dist.init_process_group(backend, init_method="env://")
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_destroy_default_group)
    _check_world_size(layout, dist.get_world_size())


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_world_size(layout: Layout, world_size: int) -> None:
    if world_size != layout.world_size:
        raise LossAggError(
            f"layout '{layout}' needs {layout.world_size} ranks (D * TP * PP * C), but there are "
            f"{world_size}: use pool.run(..., world_size=layout.world_size) or torchrun "
            f"--nproc-per-node {layout.world_size}, or change the layout"
        )


def _initialize_groups(parallel_state: Any, layout: Layout) -> None:
    instances = {}
    if layout.optimizer_instances > 1:
        instances = {"num_distributed_optimizer_instances": layout.optimizer_instances}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.ep > 1 else None,
        **instances,
    )


def _state(parallel_state: Any) -> dict[str, Any]:
    """The module's global variables: by its convention, the names in capitals that start with _."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and name.isupper()
    }


def _is_in_force(parallel_state: Any, layout: Layout) -> bool:
    """Whether `layout` is current, and nobody called Megatron's own functions since."""
    if layout != _kept.current:
        return False
    name = "_TENSOR_MODEL_PARALLEL_GROUP"
    return getattr(parallel_state, name) is _kept.layouts[layout].state[name]


def _put_aside(parallel_state: Any) -> None:
    """Make Megatron forget its groups: ours stay alive in `_kept`, others are destroyed."""
    if _kept.current is not None and _is_in_force(parallel_state, _kept.current):
        _kept.layouts[_kept.current].state = _state(parallel_state)
        # destroy_model_parallel destroys the groups that have "GLOO" in their name.
        hidden = {name: None for name in _state(parallel_state) if "GLOO" in name}
        vars(parallel_state).update(hidden)
    parallel_state.destroy_model_parallel()
    # Up to 0.13 it leaves the ranks of the embedding group, which a middle stage never sets anew.
    for name, value in _state(parallel_state).items():
        is_container = isinstance(value, dict) or value == []
        setattr(parallel_state, name, type(value)() if is_container else None)
    _kept.current = None


def _forget_another_world() -> None:
    """Drop what belongs to a default group that is gone: its subgroups went with it."""
    world = dist.group.WORLD
    if world is not _kept.world:
        _kept.layouts.clear()
        _kept.current = None
        _kept.world = world
        gc.collect()


def _destroy(kept: _KeptLayout) -> None:
    kept.objects.clear()
    # Models in DDP are reference cycles that hold groups: each group keeps a thread that wakes a
    # hundred times a second until the last reference to it is gone.
    gc.collect()
    for value in kept.state.values():
        for group in value if isinstance(value, list) else [value]:
            if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
                # Two names may hold one group, which is gone the second time.
                with contextlib.suppress(ValueError, AssertionError):
                    dist.destroy_process_group(group)
