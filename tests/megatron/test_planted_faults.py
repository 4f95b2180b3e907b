"""Property: each fault that real plugins had is found by the comparison with the reference.

A fault is planted in the plugin's own code on every rank; the plugin's checks are switched off, so
that the gradient alone must tell. Without a fault the same cases pass.
"""

from __future__ import annotations

import pytest

from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import Case
from megatron_lossagg.verification.faults import fault_names

# A layout in which the fault must show, and the modes that it must spoil.
WHERE = {
    "drop-num-microbatches": ("D=1 M=4", ["token-mean", "seq-mean-token-mean"]),
    "drop-dp-size": ("D=2 M=2", ["token-mean", "seq-mean-token-mean"]),
    "drop-cp-size": ("C=2 M=2", ["token-mean", "seq-mean-token-mean"]),
    "mean-of-means": ("D=2 M=2", ["token-mean", "seq-mean-token-mean"]),
    "counts-over-dp-cp": ("C=2 D=2 M=2", ["token-mean", "seq-mean-token-mean"]),
    "counts-of-this-rank": ("D=2 M=2", ["token-mean", "seq-mean-token-mean"]),
    "sequence-once-per-cp-rank": ("C=2 M=2", ["seq-mean-token-sum", "seq-mean-token-mean"]),
}


def test_every_fault_has_a_place():
    """No planted fault is left untested."""
    assert set(WHERE) == set(fault_names())


@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize("fault", WHERE)
def test_the_gradient_tells(rank_pool, fault, planning):
    """With the fault every mode is far above its bound in R1; without it, within."""
    text, modes = WHERE[fault]
    case = Case(Layout.parse(text), "R1", planning)
    plans = {mode: AggregatorPlan(mode) for mode in modes}
    [sound] = run_cases(rank_pool, [case], plans)
    assert sound.passed
    [faulty] = run_cases(rank_pool, [case], plans, fault=fault)
    assert not faulty.passed
    assert all(mode.gradient_error > 1e-3 for mode in faulty.modes), faulty


@pytest.mark.parametrize(
    "fault", ["mean-of-means", "counts-of-this-rank", "sequence-once-per-cp-rank"]
)
def test_it_tells_under_per_token_loss_too(rank_pool, fault):
    """The faults that concern the weights show in R3 as well."""
    text, modes = WHERE[fault]
    plans = {mode: AggregatorPlan(mode) for mode in modes}
    plans.pop("token-mean", None) if fault == "counts-of-this-rank" else None
    [faulty] = run_cases(rank_pool, [Case(Layout.parse(text), "R3")], plans, fault=fault)
    assert not faulty.passed
