"""What the commands print is whole on narrow terminals, and plain in pipes and with NO_COLOR."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from megatron_lossagg.cli.app import app
from megatron_lossagg.cli.verify.table import Outcome, print_table
from megatron_lossagg.explain.mode_weights import mode_labels
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.verification.cases import DEFAULT_MODES, Case, CaseResult, ModeResult

WIDE = 250
NARROW = [80, 60]


@pytest.fixture
def rollouts(tmp_path):
    """A file with lengths, rewards and groups, so that all tables and sentences apply."""
    path = tmp_path / "rollouts.jsonl"
    rows = [
        {"response_length": 3 + 37 * i % 900, "reward": i % 3 % 2, "group_id": i // 4}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def printed(arguments: list[str], width: int) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


def printed_on_terminal(arguments: list[str], **env: str) -> str:
    """What the command writes if its output is a terminal."""
    terminal, output = os.openpty()
    unset = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_lossagg.cli", *arguments],
        env={**unset, "TERM": "xterm", **env},
        stdout=output,
    )
    os.close(output)
    chunks = []
    try:
        while chunk := os.read(terminal, 4096):
            chunks.append(chunk)
    except OSError:
        pass  # Linux: the other end is closed
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    return b"".join(chunks).decode()


def words_of(text: str) -> list[str]:
    return [word for word in text.split() if set(word) != {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}]


@pytest.mark.parametrize("command", [[], ["verify"], ["doctor"], ["modes"], ["explain"]], ids=str)
def test_help_breaks_no_name(command):
    """At any width the same words, in lines that fit, one command or option after the other."""
    arguments = [*command, "--help"]
    wide = words_of(printed(arguments, WIDE))
    for width in NARROW:
        text = printed(arguments, width)
        assert words_of(text) == wide
        assert max(map(len, text.splitlines())) <= width


def test_help_shows_shapes():
    """[b, s] is text, not markup."""
    assert "loss_mask [b, s]" in printed(["explain", "--help"], WIDE)


@pytest.mark.parametrize("width", NARROW)
def test_explain_breaks_no_name(rollouts, width, tmp_path):
    """Narrow tables come in parts that repeat the modes; every word is one of the wide output."""
    arguments = ["explain", str(rollouts), "--no-picture", "--out", str(tmp_path)]
    text = printed(arguments, width)
    assert set(words_of(text)) == set(words_of(printed(arguments, WIDE)))
    starts = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert all(starts.count(label) >= 4 for label in mode_labels(True))
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= width


@pytest.mark.parametrize("width", NARROW)
def test_verify_breaks_no_name(width, monkeypatch, capsys):
    """Modes have a line each; the widest layout is whole, in two tables if there are many."""
    monkeypatch.setenv("COLUMNS", str(width))
    modes = [*DEFAULT_MODES, "unit-mean-seq-mean-token-mean"]
    layout = Layout.parse("PP=2 VPP=2 C=2 M=4")
    result = CaseResult(
        Case(layout, data="tp-rank-0"), tuple(ModeResult(m, 3e-16, 0) for m in modes)
    )
    print_table(Outcome([result], None, 1.0), modes)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [f"({number}) {mode}" for number, mode in enumerate(modes, 1)] == [
        line for line in lines if line.startswith("(") and "-" in line
    ]
    rows = [line.removeprefix(f"{layout} *  R1") for line in lines if line.startswith("PP=2")]
    assert " ".join(rows).split() == ["3e-16"] * len(modes) + ["0"]
    assert max(map(len, lines)) <= width


def test_escape_codes_are_for_terminals(rollouts, tmp_path):
    """None in a pipe and none at all with NO_COLOR, which by itself would keep bold and dim."""
    arguments = ["explain", str(rollouts), "--no-picture", "--out", str(tmp_path)]
    assert "\x1b[" in printed_on_terminal(arguments)
    assert "\x1b" not in printed_on_terminal(arguments, NO_COLOR="1")
    assert "\x1b" not in printed(arguments, 80)
