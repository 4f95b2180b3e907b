"""What `doctor` prints: each factor by its name, whole words at 80 columns, plain text in pipes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megatron_lossagg.cli.app import app
from megatron_lossagg.cli.doctor.case import DoctorCase
from megatron_lossagg.cli.doctor.diagnosis import diagnose
from megatron_lossagg.cli.doctor.showing import (
    new_console,
    print_diagnosis,
    print_refusal,
    print_text,
)

REGIMES = [(per_token, n) for per_token in (False, True) for n in ("loss", "loss_and_num_tokens")]


def shown(case, width):
    """The output for a setting, on a terminal of a width."""
    found = diagnose(
        case.model_flags(),
        case.groups(),
        case.mode_spec,
        case.layout.num_microbatches,
        returns=case.loss_agg.returns,
        cp_gradient=case.loss_agg.cp_gradient,
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_diagnosis(console, case, found, 1.0)
    return found, console.file.getvalue()


@pytest.mark.parametrize("cp_gradient", ["replicated-value", "gathered"])
@pytest.mark.parametrize(("per_token", "returns"), REGIMES)
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "unit-mean-seq-mean-token-mean"])
def test_80_columns_break_no_word(mode, per_token, returns, cp_gradient):
    """Every word of a wide terminal is there whole, and no line is longer; factors by name."""
    case = DoctorCase().with_overrides(
        layout="TP=8 PP=4 C=2 D=16 M=32",
        calculate_per_token_loss=per_token,
        loss_agg_mode=mode,
        returns=returns,
        cp_gradient=cp_gradient,
    )
    found, narrow = shown(case, 80)
    _, wide = shown(case, 1000)
    assert max(map(len, narrow.splitlines())) <= 80
    assert {w for w in wide.split() if set(w) != {"─"}} <= set(narrow.split())
    assert {factor.name for factor in (*found.megatron, *found.plugin)} <= set(narrow.split())


@pytest.mark.parametrize("columns", ["80", "100"])
def test_the_help_breaks_no_option(columns):
    """Every option and every value of one stands whole on a line."""
    result = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": columns})
    words = set(re.split(r"[\s,.│]+", result.output))
    assert "…" not in result.output
    for option in ("config", "layout", "loss-agg-mode", "returns", "cp-gradient", "measure"):
        assert f"--{option}" in words
    assert {"--calculate-per-token-loss", "--no-calculate-per-token-loss"} <= words
    assert {"replicated-value", "loss_and_num_tokens"} <= words


def test_a_refusal_is_one_line_in_a_pipe_and_whole_words_on_a_terminal():
    """Brackets in a reason are text, not styles."""
    reason = "shape [b, s] with calculate_per_token_loss=True " * 4
    for force_terminal, num_lines in ((False, 1), (True, 3)):
        console = Console(file=io.StringIO(), width=80, force_terminal=force_terminal)
        print_refusal(console, "D=2 M=2", reason.strip())
        lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
        assert len(lines) == num_lines
        assert " ".join(" ".join(lines).split()) == f"REFUSED in 'D=2 M=2': {reason.strip()}"


def test_no_color_is_plain_text_on_a_terminal(monkeypatch):
    """Not even bold; without NO_COLOR a terminal gets styles."""
    monkeypatch.setenv("TERM", "xterm")
    for variable, expected in (("1", "Regime R1\n"), ("", "\x1b[1mRegime R1\x1b[0m\n")):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", variable)
        console = new_console()
        console.file = io.StringIO()
        print_text(console, ("Regime R1", "bold"))
        assert console.file.getvalue() == expected


def test_the_two_flags_exclude_each_other():
    """Either overrides the file; both are a mistake."""
    flags = ["--calculate-per-token-loss", "--no-calculate-per-token-loss"]
    result = CliRunner().invoke(app, ["doctor", *flags])
    assert result.exit_code == 2 and "exclude each other" in result.output
