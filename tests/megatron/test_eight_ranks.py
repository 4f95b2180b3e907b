"""The fixture where data, context and pipeline parallelism meet: D=2 C=2 PP=2, eight ranks."""

from __future__ import annotations

import pytest
from test_public_reports import assert_fixture_f

from megatron_lossagg.testing import Layout, RankPool
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import ALL_REGIMES, Case

pytestmark = pytest.mark.conformance
LAYOUT = "PP=2 C=2 D=2 M=2"


@pytest.fixture(scope="module")
def eight_ranks():
    with RankPool(8) as pool:
        yield pool


@pytest.mark.parametrize("regime", ALL_REGIMES)
def test_fixture(eight_ranks, regime):
    """Every mode, valid and nominal counts, prescribed losses: J and gradients."""
    per_token, returns = ALL_REGIMES[regime]
    assert_fixture_f(eight_ranks, LAYOUT, per_token=per_token, returns=returns)


@pytest.mark.parametrize("regime", ALL_REGIMES)
def test_whole_model(eight_ranks, regime):
    """Whole-model gradients of every mode, padded and packed."""
    layout = Layout.parse(LAYOUT)
    for form in ("rows", "cu_seqlens_padded"):
        [result] = run_cases(eight_ranks, [Case(layout, regime, form=form)])
        assert len(result.modes) == 6 and result.passed, result
