"""One process of a `RankPool` as its parent sees it: start it, send, receive, ask where it is.

Private to `rank_pool`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

from megatron_lossagg.testing.ranks.rank_worker import RankError, serve


class RankProcess:
    """A spawned process that runs `rank_worker.serve`, and the pipe to it.

    Making one starts the process; it sends `READY` when it can take a call.
    """

    def __init__(self, number: int, folder: str):
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.stack_file = os.path.join(folder, f"stack_{number}_{time.monotonic_ns()}")
        self.pipe, child_pipe = context.Pipe()
        # Not daemonic: code under test may start processes of its own (checkpoint writers do).
        self._process = context.Process(
            target=serve, args=(number, child_pipe, self.stack_file), name=f"rank-{number}"
        )
        self._process.start()
        # With the last copy of the child's end in the child, its death reads as end of file.
        child_pipe.close()

    def send(self, message: Any) -> None:
        """Send; a dead rank is noticed when its answer is read."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """The answer, or None if the process is gone."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            return None

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.is_alive()

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process lives."""
        return self._process.exitcode

    def death(self) -> RankError:
        """The failure to report for a process that is gone."""
        text = f"the process died (exit code {self.exit_code()}) without an exception"
        return RankError(summary=text, trace=text, seconds=time.time())

    def ask_for_stack(self) -> None:
        """Make the process write the stack of its main thread to `stack_file`."""
        with contextlib.suppress(OSError):
            if self.is_running() and self._process.pid:
                os.kill(self._process.pid, signal.SIGUSR1)

    def end(self, patience_s: float) -> None:
        """Wait `patience_s` for the process to end by itself, then kill it."""
        self._process.join(timeout=patience_s)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.pipe.close()


def wait_for_any(ranks: list[RankProcess], deadline: float) -> list[RankProcess]:
    """The ranks that have answered or died; none of them if the deadline comes first."""
    pipes = {rank.pipe: rank for rank in ranks}
    ready = connection.wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
    return [pipes[pipe] for pipe in ready]  # type: ignore[index]


def current_stacks(ranks: list[RankProcess]) -> dict[int, str]:
    """Ask processes that don't answer where they are."""
    if not hasattr(signal, "SIGUSR1"):
        return {rank.number: "(no stack on this platform)\n" for rank in ranks}
    for rank in ranks:
        rank.ask_for_stack()
    deadline = time.monotonic() + 1.0
    stacks = {rank.number: "" for rank in ranks}
    while time.monotonic() < deadline and not all(stacks.values()):
        time.sleep(0.05)
        for rank in ranks:
            with contextlib.suppress(OSError), open(rank.stack_file) as stream:
                stacks[rank.number] = stream.read()
    return {number: stack or "(gave no stack)\n" for number, stack in stacks.items()}


@contextlib.contextmanager
def environment_of_ranks(path: list[str]) -> Iterator[None]:
    """What a spawned process inherits: no GPU, one thread, loopback, Ctrl-C ignored, `sys.path`.

    Args:
        path: its `sys.path`, from before it imports the script that made the pool.
    """
    main = sys.modules["__main__"]
    main_file = getattr(main, "__file__", None)
    # A script from standard input has a file name that ranks cannot import.
    hides_main = main_file is not None and not os.path.exists(main_file)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    wanted = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # What Megatron asks for, in a warning per rank.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Megatron decorates helpers with torch.compile; eager code is exact and starts at once.
        "TORCHDYNAMO_DISABLE": "1",
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
    }
    saved = {key: os.environ.get(key) for key in wanted}
    saved_path = list(sys.path)
    sys.path[:] = path
    if hides_main:
        del main.__file__
    os.environ.update(wanted)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        yield
    finally:
        sys.path[:] = saved_path
        if hides_main:
            main.__file__ = main_file
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
