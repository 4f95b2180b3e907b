"""A pool of processes, each one rank of a gloo group, started once and used for many calls.

Starting four ranks costs seconds; a call on ranks that run costs milliseconds. The pool also turns
the two ways in which distributed code fails into an exception in the caller: a rank that raises
(its traceback, not that of a peer that noticed), and ranks that wait for each other for ever (the
stack of each).

    if __name__ == "__main__":       # the ranks import the script: it must not start a pool again
        with RankPool(4) as pool:
            results = pool.run(work, 3, world_size=2) # [work(3) on rank 0, work(3) on rank 1]
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.ranks.rank_failure import RankFailure, failure_of_call, hang_of_call
from megatron_lossagg.testing.ranks.rank_process import (
    RankProcess,
    current_stacks,
    environment_of_ranks,
    wait_for_any,
)
from megatron_lossagg.testing.ranks.rank_worker import (
    READY,
    RESET,
    RESET_DONE,
    Call,
    GroupSpec,
    RankError,
)

_START_TIMEOUT_S = 180.0
_GRACE_AFTER_FAILURE_S = 2.0
_RESET_TIMEOUT_S = 5.0
_NO_GUARD = (
    "Each rank imports the script that made the pool. Put what the script runs, the RankPool "
    'included, under `if __name__ == "__main__":`.'
)


class RankPool:
    """`num_ranks` processes with one torch thread each, the CPU shim installed, joined by gloo.

    GPUs are hidden from the ranks. The pool is a context manager; it also closes at exit.
    After a failure the ranks are reset, or replaced, when the next call comes. Processes start on
    `start`, `with` or the first `run`.

    Args:
        num_ranks: number of processes, at least 1.
        timeout_s: seconds a call may take, unless `run` is given another limit.
        megatron_core: a folder with `megatron/core` in it (an unpacked wheel, see
            `releases.fetch`), from which the ranks import Megatron-Core; a call fails if they
            got it from elsewhere. None takes the installed one. The process that makes the pool
            is not affected.

    Raises:
        ValueError: an argument is not as said.
    """

    def __init__(
        self,
        num_ranks: int,
        timeout_s: float = 120.0,
        *,
        megatron_core: str | os.PathLike[str] | None = None,
    ):
        if not isinstance(num_ranks, int) or num_ranks < 1:
            raise ValueError(f"RankPool: num_ranks must be an int of at least 1, got {num_ranks!r}")
        if timeout_s <= 0:
            raise ValueError(f"RankPool: timeout_s must be positive, got {timeout_s!r}")
        if megatron_core is not None and not os.path.isdir(
            os.path.join(megatron_core, "megatron", "core")
        ):
            raise ValueError(
                "RankPool: megatron_core must be a folder with megatron/core in it, got "
                f"{os.fspath(megatron_core)!r}"
            )
        self.num_ranks = num_ranks
        self._megatron_core = None if megatron_core is None else os.path.abspath(megatron_core)
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._ranks: list[RankProcess] = []
        self._groups: dict[int, GroupSpec] = {}
        self._num_groups = 0
        self._needs_reset = False
        self._is_ready = False
        self._folder: str | None = None

    def __enter__(self) -> RankPool:
        """Start the ranks; they import while the caller goes on."""
        self.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Close the pool."""
        self.close()

    def start(self) -> None:
        """Start the processes if they don't run, without waiting for them."""
        with self._lock:
            if self._ranks:
                return
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise LossAggError(f"A RankPool was made while a rank was starting. {_NO_GUARD}")
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="rank_pool_")
                atexit.register(self.close)
            self._is_ready = self._needs_reset = False
            self._groups.clear()
            with environment_of_ranks(self._sys_path()):
                self._ranks = [RankProcess(rank, self._folder) for rank in range(self.num_ranks)]

    def close(self) -> None:
        """End the processes. Idempotent; a later `run` starts new ones."""
        with self._lock:
            for rank in self._ranks:
                rank.send(None)
            self._end_ranks(patience_s=2.0 if self._is_ready else 0.0)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
                atexit.unregister(self.close)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on ranks 0..world_size-1, which communicate as `fn` does.

        The default process group of `torch.distributed` has exactly these ranks. It is kept from
        call to call while the world size stays the same.

        Args:
            fn: a function that the ranks can import: defined at the top level of a module.
            *args: picklable arguments, the same for every rank.
            world_size: number of ranks that take part; all of them by default.
            timeout_s: seconds until the call counts as hung; the pool's by default.
            **kwargs: picklable keyword arguments.

        Returns:
            The results, one per rank, in the order of the ranks.

        Raises:
            RankFailure: a rank raised (the exception is the `__cause__`), died or hung.
            ValueError: `world_size` is not in 1..num_ranks, or `fn` cannot be pickled.
        """
        world_size = self.num_ranks if world_size is None else world_size
        if not isinstance(world_size, int) or not 1 <= world_size <= self.num_ranks:
            raise ValueError(
                f"RankPool.run: world_size must be an int in 1..{self.num_ranks} (the pool's "
                f"num_ranks), got {world_size!r}"
            )
        name = getattr(fn, "__qualname__", repr(fn))
        try:
            pickled_call = pickle.dumps((fn, args, kwargs))
        except Exception as error:
            raise ValueError(
                f"RankPool.run: {name} and its arguments must be picklable ({error}); use a "
                "function defined at the top level of a module, not a lambda or a closure"
            ) from error
        with self._lock:
            try:
                self._make_ready()
                group = self._group_of(world_size)
                call = Call(group, self._sys_path(), pickled_call, self._megatron_core)
                for rank in self._ranks[:world_size]:
                    rank.send(call)
                limit_s = self.timeout_s if timeout_s is None else timeout_s
                return self._collect(name, self._ranks[:world_size], limit_s)
            except RankFailure:
                raise
            except BaseException:  # Ctrl-C included: nobody knows what the ranks are doing now
                self._end_ranks()
                raise

    def _sys_path(self) -> list[str]:
        """That of the ranks: this process's, behind the folder of the chosen Megatron-Core."""
        return list(sys.path) if self._megatron_core is None else [self._megatron_core, *sys.path]

    def _make_ready(self) -> None:
        if self._needs_reset and not self._answers(RESET_DONE, RESET, _RESET_TIMEOUT_S):
            self._end_ranks()
        if self._needs_reset:
            self._needs_reset = False
            self._groups.clear()
        if not all(rank.is_running() for rank in self._ranks) and self._is_ready:
            self._end_ranks()
        self.start()
        if not self._is_ready:
            if not self._answers(READY, None, _START_TIMEOUT_S):
                self._raise_start_failure()
            self._is_ready = True

    def _answers(self, expected: str, request: str | None, limit_s: float) -> bool:
        """Whether all ranks answer `expected` in time."""
        deadline = time.monotonic() + limit_s
        if request is not None:
            for rank in self._ranks:
                rank.send(request)
        pending = list(self._ranks)
        while pending:
            answered = wait_for_any(pending, deadline)
            if not answered or any(rank.receive() != expected for rank in answered):
                return False
            pending = [rank for rank in pending if rank not in answered]
        return True

    def _raise_start_failure(self) -> None:
        dead = [(rank.number, rank.exit_code()) for rank in self._ranks if not rank.is_running()]
        self._end_ranks()
        if not dead:
            raise RankFailure(f"the ranks did not start within {_START_TIMEOUT_S:.0f} s")
        number, exit_code = dead[0]
        raise RankFailure(
            f"rank {number} of {self.num_ranks} died while it started (exit code {exit_code}; its "
            f"own message is on stderr). {_NO_GUARD}",
            rank=number,
        )

    def _group_of(self, world_size: int) -> GroupSpec:
        """The default group that ranks 0..world_size-1 are in, or a new one for them."""
        specs = {self._groups.get(rank) for rank in range(world_size)}
        spec = specs.pop() if len(specs) == 1 else None
        if spec is None or spec.world_size != world_size:
            self._num_groups += 1
            file = os.path.join(str(self._folder), f"rendezvous_{self._num_groups}")
            spec = GroupSpec(self._num_groups, world_size, file)
            self._groups.update({rank: spec for rank in range(world_size)})
        return spec

    def _collect(self, name: str, ranks: list[RankProcess], limit_s: float) -> list[Any]:
        replies: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        deadline = time.monotonic() + limit_s
        pending = list(ranks)
        while pending:
            answered = wait_for_any(pending, deadline)
            if not answered:
                break
            for rank in answered:
                reply = rank.receive()
                error = rank.death() if reply is None else reply.failure
                if error is None:
                    replies[rank.number] = pickle.loads(reply.pickled_result)
                else:
                    errors[rank.number] = error
                    # The others may wait for this rank for ever; what they still have to say is
                    # said soon.
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
            pending = [rank for rank in pending if rank not in answered]
        if not pending and not errors:
            return [replies[rank.number] for rank in ranks]
        stacks = current_stacks(pending)
        if pending or any(not rank.is_running() for rank in ranks):
            self._end_ranks()
        else:
            self._needs_reset = True
        if errors:
            raise failure_of_call(name, len(ranks), errors, stacks)
        raise hang_of_call(name, limit_s, stacks, sorted(replies))

    def _end_ranks(self, patience_s: float = 0.0) -> None:
        deadline = time.monotonic() + patience_s
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
        self._ranks = []
        self._is_ready = self._needs_reset = False
