"""`doctor`: its factors cancel, its files and flags are read, refusals are told."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatron_lossagg.cli.app import app
from megatron_lossagg.cli.doctor.case import DoctorCase
from megatron_lossagg.cli.doctor.diagnosis import diagnose
from megatron_lossagg.modes import ModeSpec, register_mode
from megatron_lossagg.modes.registry import _MODES
from megatron_lossagg.testing import Layout

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
    for text in ("Regime R1", "128 ranks", "forward_step_calc_loss", "B_valid / B = 1", "x 1/128"):
        assert text in " ".join(result.output.split()), text


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
        ("layot: D=2\n", "unknown option(s) layot; known ones: layout, loss_agg, model, counts"),
        ("layout: 3\n", "layout: Layout.parse: cannot read '3' in '3'; expected pairs like"),
        ("layout: D=0\n", "dp must be an int of at least 1"),
        ("loss_agg: {loss_agg_mode: mean}\n", "Unknown loss_agg_mode 'mean'"),
        ("counts: {num_tokens: 3}\n", "counts: missing option(s) num_valid_seqs, num_seqs"),
        (
            "counts: {num_tokens: 0.5, num_valid_seqs: 1, num_seqs: 1}\n",
            "counts.num_tokens must be a who",
        ),
        ("model: 3\n", "model must be a mapping, got 3 of type int"),
        ("model: {num_moe_experts: few}\n", "model.num_moe_experts must be a whole number"),
        ("model: {calculate_per_token_loss: 1}\n", "must be true or false, got 1 of type int"),
        ("model: {calculate_per_token_los: on}\n", "Config has no calculate_per_token_los"),
        ("layout: {D: 2}\n", "layout: unknown option(s) D; known ones: dp, tp"),
        ("[1]\n", "expected a mapping of options, got list"),
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
    assert case.calculate_per_token_loss
    assert isinstance(case.model_flags(), SimpleNamespace)
    assert case.model_flags().num_moe_experts == 8


def test_a_file_is_read_as_every_other(tmp_path):
    """Numbers and flags as text: counts, layout, the plugin's options and the model's flags."""
    path = tmp_path / "a.yaml"
    path.write_text(
        "layout: {dp: '4', num_microbatches: 1e1}\n"
        "loss_agg: {loss_agg_mode: seq-mean-token-sum-norm, loss_scale_factor: 2e3, compile: no}\n"
        "model: {calculate_per_token_loss: 'false', num_moe_experts: '8', hidden_size: 64}\n"
        "counts: {num_tokens: 1e6, num_valid_seqs: 1e3, num_seqs: '1024'}\n"
    )
    case = DoctorCase.load(path)
    assert case.layout == Layout(dp=4, num_microbatches=10)
    flags = {"calculate_per_token_loss": False, "num_moe_experts": 8, "hidden_size": 64}
    assert case.model == flags
    shown = json.loads(doctor("--config", str(path), "--json").stdout)
    assert shown["regime"] == "R1" and shown["checksum"] == 1e6 / 2e3
    assert shown["layout_is_assumed"] is False


@pytest.mark.parametrize("layout", ["DP=4 CP=2 M=8", "D=4 C=2 M=8", "dp=4, cp=2, m=8"])
def test_names_of_the_sizes(layout, tmp_path):
    """D and C are also DP and CP, on the command line and in a file; not both at once."""
    path = tmp_path / "a.yaml"
    path.write_text(f"layout: {layout}\n")
    for arguments in (("--layout", layout), ("--config", str(path))):
        shown = json.loads(doctor(*arguments, "--json").stdout)
        assert shown["layout"] == "C=2 D=4 M=8" and shown["loss_factor"] == 8 * 4
    result = doctor("--layout", "DP=2 D=2")
    assert result.exit_code == 2 and "D is given twice in 'DP=2 D=2'" in result.output


def test_an_assumed_layout_is_told(tmp_path):
    """Without one it is said what is assumed and how to give one; also above a refusal."""
    path = tmp_path / "a.yaml"
    path.write_text("model: {calculate_per_token_loss: on, num_moe_experts: 4}\n")
    note = "No layout was given: this is about 'D=1 M=1', one rank and one microbatch. Give yours: "
    for arguments in ((), ("--config", str(path)), ("--config", str(path), "--returns", "loss")):
        result = doctor(*arguments)
        assert result.output.startswith(f"{note}--layout 'TP=8 PP=4 D=16 C=2 M=32', or `layout:`")
        assert result.exit_code == ("--returns" in arguments)
    assert "No layout" not in doctor("--layout", "D=1 M=1").output
    shown = json.loads(doctor("--json").stdout)
    assert shown["layout_is_assumed"] and shown["layout"] == "D=1 M=1"


@pytest.fixture
def own_modes():
    """Two registered modes, with a checksum and without; forgotten afterwards."""
    before = dict(_MODES)
    register_mode("untold", lambda n_s, c: n_s)
    register_mode("told", lambda n_s, c: n_s, checksum=lambda c: 2 * c.num_tokens)
    yield
    _MODES.clear()
    _MODES.update(before)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("untold", "the counts do not tell what its weights sum to; every step is compared with "),
        ("length-power-0.5", "Checksum of length-power-0.5: the counts do not tell what its"),
        ("told", "sum to what its checksum in test_doctor computes (no formula given) = 20;"),
        ("token-sum", "the weights of the global batch sum to T = 10; every step is checked"),
    ],
)
def test_the_checksum_of_each_kind_of_mode(mode, text, own_modes, tmp_path):
    """A formula where there is one; else what each step is compared with."""
    path = tmp_path / "a.yaml"
    counts = "{num_tokens: 10, num_valid_seqs: 2, num_seqs: 3}"
    path.write_text(f"loss_agg: {{loss_agg_mode: {mode}}}\ncounts: {counts}\n")
    result = doctor("--config", str(path))
    assert text in " ".join(result.output.split()), result.output
    assert "sum to its checksum" not in result.output
