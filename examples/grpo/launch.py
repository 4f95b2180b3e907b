"""Where ranks come from: torchrun's, if it started this process, or else our own on the CPU."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo.stopping import stop_file
from megatron_lossagg.testing import RankFailure, RankPool

# A run may take as long as it likes; more milliseconds than this do not fit where the pool waits.
_NO_LIMIT_S = 20 * 24 * 3600.0


T = TypeVar("T")


class JobFailed(Exception):
    """A rank failed. The text is its traceback, with a line on what the others did."""


def is_rank_of_torchrun() -> bool:
    """Whether torchrun (or Slurm with its variables) started this process as one of many."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_process() -> bool:
    """Whether this process speaks for the job before its ranks have joined each other."""
    return int(os.environ.get("RANK", 0)) == 0


def on_first_process(make: Callable[[], T], world_size: int) -> T:
    """What `make` returns on the first process, on all of them.

    Under torchrun the ranks join each other here, and it communicates over all of them: a
    ValueError of the first is raised by all, so none waits for another.

    Raises:
        ValueError: that of `make`, or torchrun started another number of ranks than `world_size`.
    """
    if not is_rank_of_torchrun():
        return make()
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise ValueError(
            f"The layout needs tp x pp x dp x cp = {world_size} ranks, but torchrun started "
            f"{os.environ['WORLD_SIZE']}. Change the layout, or --nproc-per-node and --nnodes."
        )
    _join()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = make()
        except ValueError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def _join() -> None:
    """Join the ranks that torchrun started: NCCL with GPUs, gloo without."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl")
    else:
        torch.set_num_threads(1)
        # Megatron compiles some helpers: that takes long on a CPU and gains nothing here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)


def launch(rank_main: Callable[..., Any], *args: Any, world_size: int, out: Path) -> Any:
    """Run `rank_main(*args)` on every rank; returns what the first one returned.

    Under torchrun this process is a rank, which `on_first_process` has joined to the others.
    Otherwise this starts `world_size` processes with one thread each, and waits for them; a Ctrl-C
    asks them to stop after their step, a second one ends them.

    Args:
        rank_main: a function that the ranks can import.
        *args: picklable.
        world_size: number of ranks.
        out: the run's folder, where a request to stop is left.

    Raises:
        JobFailed: a rank of ours failed; all have ended.
        KeyboardInterrupt: Ctrl-C a second time; all have ended.
    """
    if is_rank_of_torchrun():
        return rank_main(*args)
    try:
        with _signals_ask_to_stop(out), RankPool(world_size, timeout_s=_NO_LIMIT_S) as pool:
            return pool.run(rank_main, *args)[0]
    except RankFailure as failure:
        raise JobFailed(str(failure)) from failure
    finally:
        if sys.stdout.isatty():
            # A display that was killed has hidden the cursor.
            print("\x1b[?25h", end="", flush=True)


@contextmanager
def _signals_ask_to_stop(out: Path) -> Iterator[None]:
    """SIGINT and SIGTERM leave a request to stop; the next one raises KeyboardInterrupt."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop_file(out).exists():
            raise KeyboardInterrupt
        stop_file(out).touch()
        print("\nStopping after this step (Ctrl-C again: at once) ...", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, on_signal) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
