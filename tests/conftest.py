"""Fixtures shared by all tests."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from megatron_lossagg.testing import RankPool

# Groups that MoE layers and multi-token prediction have used are not freed with their layout, and
# each gloo group has threads that wake a hundred times a second: hundreds slow every test down.
_MAX_THREADS = 300


def pytest_addoption(parser):
    parser.addoption(
        "--releases-table",
        metavar="FILE",
        help="write the table of Megatron-Core releases there if the whole matrix was run",
    )


@pytest.fixture(scope="session")
def rank_pool():
    """Four ranks, started once; a test takes as many as its layout needs."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(autouse=True)
def fresh_ranks(request):
    """After a test: new ranks, where the old ones have gathered too many threads."""
    yield
    if "rank_pool" in request.fixturenames and Path("/proc/self/task").is_dir():
        pool = request.getfixturevalue("rank_pool")
        # Looked up from outside: a call would have the ranks change their groups.
        if max(map(_num_threads, multiprocessing.active_children()), default=0) > _MAX_THREADS:
            pool.close()
            pool.start()


def _num_threads(process):
    try:
        return len(os.listdir(f"/proc/{process.pid}/task"))
    except FileNotFoundError:  # it has ended
        return 0
