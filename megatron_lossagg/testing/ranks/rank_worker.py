"""What runs in each process of a `RankPool`: wait for a call, join its group, run it, answer.

Private to `rank_pool`. Megatron is imported by the function that is called. Only if the pool was
told which Megatron-Core it must be, that one is imported, and looked at, before each call.
"""

from __future__ import annotations

import datetime
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import Any

import torch
import torch.distributed as dist

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

from megatron_lossagg.testing.ranks.device_shim import install_cpu_shim

# Longer than any call may take: it is the parent that notices a hang, with a stack of every rank.
_GROUP_TIMEOUT = datetime.timedelta(hours=1)
_PEER_FAILURE_TEXTS = (
    "connection closed by peer",
    "connection reset",
    "gloo/transport",
    "timed out",
)

# What Megatron's import and collectives say on a machine like this, once per rank.
_KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    r"`torch\.distributed\..*` is deprecated",
)


@dataclass(frozen=True)
class GroupSpec:
    """A default process group: ranks that hold equal specs are in one group."""

    number: int
    world_size: int
    rendezvous_file: str


@dataclass(frozen=True)
class Call:
    """One function call, sent to every rank that takes part.

    Attributes:
        group: the default group to be in.
        sys_path: what `sys.path` is set to.
        pickled_call: (function, args, kwargs).
        megatron_core: the folder from which `megatron.core` must come; None leaves it open.
    """

    group: GroupSpec
    sys_path: list[str]
    pickled_call: bytes
    megatron_core: str | None = None


@dataclass(frozen=True)
class Reply:
    """What a rank answers: a pickled result, or the failure."""

    pickled_result: bytes = b""
    failure: RankError | None = None


@dataclass(frozen=True)
class RankError:
    """A failure as seen by one rank. `is_echo`: it failed since a peer went away."""

    summary: str
    trace: str
    is_echo: bool = False
    seconds: float = 0.0
    pickled_exception: bytes = b""


READY, RESET, RESET_DONE = "ready", "reset", "reset done"


def serve(rank: int, pipe: connection.Connection, stack_file: str) -> None:
    """Answer calls until the pool closes the pipe. The target of each spawned process."""
    # Ctrl-C reaches the whole terminal group. The parent decides; ranks just obey it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _allow_many_open_files()
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    install_cpu_shim()
    with open(stack_file, "w") as stack_stream:
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=stack_stream, all_threads=False)
        pipe.send(READY)
        _serve_calls(rank, pipe)
    # Leaving hundreds of gloo groups in order takes seconds, and nobody waits for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve_calls(rank: int, pipe: connection.Connection) -> None:
    current: GroupSpec | None = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            return
        if message == RESET:
            _leave_group()
            current = None
            pipe.send(RESET_DONE)
            continue
        try:
            if message.group != current:
                _leave_group()
                _join_group(rank, message.group)
                current = message.group
            reply = Reply(pickled_result=_run(message))
        except (Exception, SystemExit) as error:
            reply = Reply(failure=_describe(error))
        pipe.send(reply)


def _allow_many_open_files() -> None:
    # A gloo group holds sockets, and Megatron makes some 30 groups for a layout.
    if resource is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(rank: int, group: GroupSpec) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group.rendezvous_file}",
        rank=rank,
        world_size=group.world_size,
        timeout=_GROUP_TIMEOUT,
    )


def _run(call: Call) -> bytes:
    # pytest adds a test's folder to sys.path after the pool has started.
    sys.path[:] = call.sys_path
    if call.megatron_core is not None:
        _import_megatron_core(call.megatron_core)
    fn, args, kwargs = pickle.loads(call.pickled_call)
    result = fn(*args, **kwargs)
    try:
        return _pickled(result)
    except Exception as error:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} returned a {type(result).__name__} that cannot be "
            f"pickled ({error}); return tensors, numbers and plain containers"
        ) from error


class _Pickler(pickle.Pickler):
    """Pickles tensors so that torch alone can read them.

    megatron-core from 0.17 on puts a loader of its own in place of torch's. The parent would have
    to import Megatron-Core to read what is pickled then, and may have another release.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            return load_storage, obj.__reduce__()[1]
        return NotImplemented


def load_storage(content: bytes) -> Any:
    """Read what `torch.save` made of a tensor's storage; as in torch, only from a rank of ours."""
    return torch.load(io.BytesIO(content), weights_only=False)


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _import_megatron_core(folder: str) -> None:
    """Import it; raise ImportError if it is another one, which a test would not notice."""
    import megatron.core

    found = os.path.dirname(str(megatron.core.__file__))
    if not os.path.samefile(found, os.path.join(folder, "megatron", "core")):
        raise ImportError(
            f"this rank must import Megatron-Core from {folder}, but got {found}: something has "
            "imported it before, or a package `megatron` with an __init__.py hides the folder"
        )


def _describe(error: BaseException) -> RankError:
    text = str(error)
    try:
        pickled = _pickled(error)
        pickle.loads(pickled)
    except Exception:
        pickled = b""
    return RankError(
        summary=f"{type(error).__name__}: {text}",
        trace="".join(traceback.format_exception(error)),
        is_echo=any(part in text.lower() for part in _PEER_FAILURE_TEXTS),
        seconds=time.time(),
        pickled_exception=pickled,
    )


def _exit_with_parent(wait: Callable[[list[Any]], Any] = connection.wait) -> None:
    # A parent that was killed cannot close its pool; a rank inside a collective would stay.
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
