"""RankPool: results, failures and hangs of ranks reach the caller; the pool works on afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing import RankFailure, RankPool, cpu_shim_installed

_ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout_s=30) as pool:
        yield pool


def _sum_of_ranks(offset: float, *, scale: float = 1.0) -> tuple[int, int, float]:
    total = torch.tensor([dist.get_rank() + offset], dtype=torch.float64)
    dist.all_reduce(total)
    return os.getpid(), dist.get_world_size(), total.item() * scale


def _facts() -> dict:
    return {
        "threads": torch.get_num_threads(),
        "shim": cpu_shim_installed(),
        "cuda": torch.cuda.is_available(),
    }


def _raise_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise KeyError("the root cause")
    dist.barrier()


def _raise_on_all() -> None:
    raise ValueError(f"refused on rank {dist.get_rank()}")


def _die_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os._exit(7)
    dist.barrier()


def _barrier_that_rank_1_forgets() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def _return_a_lambda():
    return lambda: None


def test_results_come_in_rank_order_and_processes_are_reused(pool):
    """Same processes for each call; the default group has exactly the ranks asked for."""
    first = pool.run(_sum_of_ranks, 1.0, scale=10.0)
    assert [size for _, size, _ in first] == [2, 2]
    assert [total for _, _, total in first] == [30.0, 30.0]
    alone = pool.run(_sum_of_ranks, 1.0, world_size=1)
    assert alone == [(first[0][0], 1, 1.0)]
    assert [pid for pid, _, _ in pool.run(_sum_of_ranks, 0.0)] == [pid for pid, _, _ in first]


def test_ranks_are_single_threaded_cpu_processes(pool):
    """No GPU, one torch thread, the shim installed."""
    assert pool.run(_facts) == [{"threads": 1, "shim": True, "cuda": False}] * 2


def test_failing_rank_is_named_with_its_traceback(pool):
    """The root failure is reported, not the peer that waits for it."""
    with pytest.raises(RankFailure, match="rank 1 of 2 failed in _raise_on: KeyError") as caught:
        pool.run(_raise_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, LossAggError)
    assert "in _raise_on" in str(caught.value) and "the root cause" in str(caught.value)
    assert pool.run(_sum_of_ranks, 1.0)[0][2] == 3.0


def test_failure_on_all_ranks_keeps_the_processes(pool):
    """A refusal that every rank makes costs no restart."""
    before = [pid for pid, _, _ in pool.run(_sum_of_ranks, 0.0)]
    with pytest.raises(RankFailure, match="refused on rank"):
        pool.run(_raise_on_all)
    assert [pid for pid, _, _ in pool.run(_sum_of_ranks, 0.0)] == before


def test_rank_that_dies_is_named_not_its_peer(pool):
    """Rank 0 sees a broken connection; rank 1 is the one to report."""
    with pytest.raises(RankFailure, match=r"rank 1 of 2 .*exit code 7"):
        pool.run(_die_on, 1)
    assert pool.run(_sum_of_ranks, 1.0)[0][2] == 3.0


def test_hang_is_ended_and_shows_where_each_rank_was(pool):
    """A collective that one rank forgets: the waiting rank's stack names the function."""
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"did not finish within 1 s: ranks \[0\]") as caught:
        pool.run(_barrier_that_rank_1_forgets, timeout_s=1)
    assert time.monotonic() - start < 20
    assert "_barrier_that_rank_1_forgets" in caught.value.failures[0]
    assert pool.run(_sum_of_ranks, 1.0)[0][2] == 3.0


def test_bad_arguments(pool):
    """What was passed and what was expected is in the message."""
    with pytest.raises(ValueError, match=r"world_size must be an int in 1\.\.2 .* got 3"):
        pool.run(_facts, world_size=3)
    with pytest.raises(ValueError, match="not a lambda"):
        pool.run(lambda: 0)
    with pytest.raises(ValueError, match="num_ranks must be an int of at least 1, got 0"):
        RankPool(0)
    with pytest.raises(RankFailure, match="_return_a_lambda returned a function that cannot be"):
        pool.run(_return_a_lambda)


def _run_script(text: str, folder: Path) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_script_without_main_guard_is_told_so(tmp_path):
    """The commonest mistake with spawned processes gets its own message, and no hang."""
    done = _run_script(
        "from megatron_lossagg.testing import RankPool\npool = RankPool(2)\npool.run(print)\n",
        tmp_path,
    )
    assert done.returncode != 0
    assert 'under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_script_with_main_guard_may_leave_the_pool_open(tmp_path):
    """Functions of the script itself work, and exit ends the ranks."""
    done = _run_script(
        "import os\n"
        "from megatron_lossagg.testing import RankPool\n"
        "def work(x):\n"
        "    return x + 1, os.getpid()\n"
        'if __name__ == "__main__":\n'
        "    pool = RankPool(1)\n"
        "    print(*pool.run(work, 1)[0], *pool.run(work, 2)[0])\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, pid, second, same_pid = map(int, done.stdout.split())
    assert (first, second, same_pid) == (2, 3, pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_script_from_standard_input():
    """It cannot be imported by the ranks; functions of modules work all the same."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=(
            "import os\n"
            "from megatron_lossagg.testing import RankPool\n"
            "with RankPool(1) as pool:\n"
            "    print(pool.run(os.path.basename, 'a/b'))\n"
        ),
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "['b']\n", done.stderr
