"""`doctor`: its factors cancel, its files and flags are read, refusals are told."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatron_lossagg.commands import app
from megatron_lossagg.commands.doctor_case import DoctorCase
from megatron_lossagg.diagnosis import diagnose
from megatron_lossagg.modes import ModeSpec

LAYOUTS = ["D=1 M=1", "D=4 M=3", "TP=8 PP=4 C=2 D=16 M=32", "C=4 D=2 M=5"]
REGIMES = {"R1": (False, "loss"), "R2": (False, "loss_and_num_tokens")}
REGIMES |= {"R3": (True, "loss_and_num_tokens"), "R4": (True, "loss")}


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize("cp_gradient", ["local", "replicated-value", "gathered"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_of_megatron_and_plugin_cancel(layout, regime, cp_gradient):
    """Their product is 1, or 1/C where the backward of a gather sums over C ranks."""
    per_token, returns = REGIMES[regime]
    case = DoctorCase().with_overrides(layout=layout, calculate_per_token_loss=per_token)
    from megatron_lossagg import GlobalCounts

    found = diagnose(
        case.model_flags(),
        case.groups(),
        ModeSpec("token-mean"),
        case.layout.num_microbatches,
        returns=returns,
        cp_gradient=cp_gradient,
        counts=GlobalCounts(1000, 10, 12),
    )
    assert found.contract.regime == regime
    product = math.prod(factor.value for factor in (*found.megatron, *found.plugin))
    expected = 1 / case.layout.cp if cp_gradient == "gathered" else 1
    assert product == pytest.approx(expected, rel=1e-12)


def test_table_of_a_setting(tmp_path):
    """The file of the README: regime, factors with their origin, checksum and mistakes."""
    result = doctor("--config", "configs/doctor_context_parallel.yaml")
    assert result.exit_code == 0, result.output
    for text in ("Regime R1", "128 ranks", "forward_step_calc_loss", "B_valid/B = 1", "x 1/128"):
        assert text in result.output, text


def test_flags_override_the_file(tmp_path):
    """Each flag alone; what is not named stays as the file says."""
    path = tmp_path / "a.yaml"
    path.write_text("layout: {dp: 2, num_microbatches: 4}\nloss_agg: {loss_agg_mode: token-sum}\n")
    shown = json.loads(doctor("--config", str(path), "--json").stdout)
    assert (shown["regime"], shown["layout"], shown["loss_factor"]) == ("R1", "D=2 M=4", 8)
    assert shown["loss_agg"]["loss_agg_mode"] == "token-sum" and shown["checksum"] is None
    options = ("--layout", "C=2 M=2", "--returns", "loss", "--calculate-per-token-loss")
    shown = json.loads(doctor("--config", str(path), "--json", *options).stdout)
    assert (shown["regime"], shown["layout"], shown["loss_factor"]) == ("R4", "C=2 M=2", 1)
    assert shown["loss_agg"]["loss_agg_mode"] == "token-sum"


def test_a_refused_setting_says_why():
    """Exit status 1 and the reason, in text and in JSON."""
    result = doctor("--layout", "PP=2 VPP=2 M=4")
    assert result.exit_code == 1 and "REFUSED" in result.output
    assert "overlap_p2p_comm" in result.output
    result = doctor("--layout", "PP=2 VPP=2 M=4", "--json")
    assert result.exit_code == 1 and "overlap_p2p_comm" in json.loads(result.stdout)["refused"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layot: D=2\n", "unknown key(s) layot; known ones: layout, loss_agg, model, counts"),
        ("layout: 3\n", "layout must be text such as"),
        ("layout: D=0\n", "dp must be an int of at least 1"),
        ("loss_agg: {loss_agg_mode: mean}\n", "Unknown loss_agg_mode 'mean'"),
        ("counts: {num_tokens: 3}\n", "counts lacks num_valid_seqs, num_seqs"),
        ("counts: {num_tokens: 0.5, num_valid_seqs: 1, num_seqs: 1}\n", "must be an int"),
        ("model: 3\n", "model must be a mapping, got int"),
        ("[1]\n", "must be a mapping, got list"),
        (": :\n", "expected <block end>"),
    ],
)
def test_bad_files(tmp_path, text, message):
    """Exit status 2, the path and what is wrong."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    result = doctor("--config", str(path))
    assert result.exit_code == 2
    assert str(path) in result.output and message in result.output, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "nowhere.yaml"), "No such file"),
        (("--layout", "X=2"), "cannot read 'X=2'"),
        (("--loss-agg-mode", "mean"), "Unknown loss_agg_mode"),
        (("--layout", "D=32 M=1", "--measure"), "starts a process per rank"),
    ],
)
def test_bad_arguments(arguments, message):
    """Exit status 2, no process started."""
    result = doctor(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output


def test_model_flags_reach_the_refusals():
    """A flag of the model's config is looked at as in a real config."""
    case = DoctorCase(model={"num_moe_experts": 8, "calculate_per_token_loss": True})
    assert isinstance(case.model_flags(), SimpleNamespace)
    assert case.model_flags().num_moe_experts == 8
