"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_lossagg.testing import RankPool

# Groups that MoE layers and multi-token prediction have used are not freed with their layout, and
# each gloo group has threads that wake a hundred times a second: hundreds slow every test down.
_MAX_THREADS = 220
_THREADS = "/proc/self/task"


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
    if "rank_pool" in request.fixturenames and Path(_THREADS).is_dir():
        pool = request.getfixturevalue("rank_pool")
        if max(map(len, pool.run(os.listdir, _THREADS))) > _MAX_THREADS:
            pool.close()
            pool.start()
