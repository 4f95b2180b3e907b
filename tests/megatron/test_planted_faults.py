"""Property: each fault that real plugins had is found by the comparison with the reference.

A fault is planted in the plugin's own code on every rank; the plugin's checks are switched off, so
that the gradient alone must tell. Without a fault the same cases pass.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megatron_lossagg.commands import app
from megatron_lossagg.testing.aggregator_plan import AggregatorPlan
from megatron_lossagg.testing.faults import fault_names
from megatron_lossagg.testing.layout import Layout
from megatron_lossagg.testing.verification import Case, run_cases

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


def test_the_command_fails_on_a_planted_fault():
    """`verify` exits with 1 and names the layout; without the fault with 0."""
    arguments = ["verify", "--layouts", "D=2 M=2", "--modes", "token-mean", "--regimes", "R1"]
    runner = CliRunner()
    sound = runner.invoke(app, [*arguments, "--json"])
    assert sound.exit_code == 0, sound.output
    report = json.loads(sound.stdout)
    assert report["passed"] and len(report["cases"]) == 2
    assert report["megatron_core"] and report["cases"][0]["layout"] == "D=2 M=2"
    faulty = runner.invoke(app, [*arguments, "--plant", "drop-dp-size"])
    assert faulty.exit_code == 1, faulty.output
    assert "FAILED" in faulty.output and "2 of 2 cases" in faulty.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "PP=two"], "cannot read 'PP=two'"),
        (["--modes", "batch-mean"], "'batch-mean' is none of token-mean"),
        (["--regimes", "R7"], "'R7' is none of R1, R2, R3, R4"),
        (["--layouts", ";"], "names none"),
    ],
)
def test_the_command_explains_wrong_arguments(arguments, message):
    """Exit code 2 and what was expected, before any rank is started."""
    result = CliRunner().invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert message in result.output
