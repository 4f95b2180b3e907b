"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest

from megatron_lossagg.testing import RankPool


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
