"""Property: `megatron-lossagg verify` runs what it is asked for, and its exit code tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_lossagg.cli.app import app
from megatron_lossagg.cli.verify.config import VerifyConfig
from megatron_lossagg.cli.verify.table import Outcome, print_table
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.verification.cases import Case, CaseResult, ModeResult, default_cases

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def written(folder: Path, **options) -> Path:
    path = folder / "verify.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def test_the_command_fails_on_a_planted_fault(tmp_path):
    """A file with packed cases passes, exit code 0; with a fault 1, and the case is named."""
    config = written(
        tmp_path,
        layouts=["C=2 M=2"],
        modes="token-mean",
        regimes=["R1"],
        planning=["wrap"],
        packed=True,
        cp_gradient=["local", "gathered"],
    )
    runner = CliRunner()
    sound = runner.invoke(app, ["verify", "--config", str(config), "--json"])
    assert sound.exit_code == 0, sound.output
    report = json.loads(sound.stdout)
    assert report["passed"] and report["megatron_core"]
    assert [(c["layout"], c["form"], c["cp_gradient"]) for c in report["cases"]] == [
        ("C=2 M=2", form, convention)
        for form in ("cu_seqlens", "cu_seqlens_padded")
        for convention in ("local", "gathered")
    ]
    flags = ["--no-packed", "--cp-gradient", "local", "--plant", "drop-cp-size"]
    faulty = runner.invoke(app, ["verify", "--config", str(config), *flags])
    assert faulty.exit_code == 1, faulty.output
    assert "FAILED: 1 of 1 cases" in faulty.output
    assert "C=2 M=2, R1, wrap\n" in faulty.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "PP=two"], "cannot read 'PP=two'"),
        (["--modes", "batch-mean"], "modes: 'batch-mean' is none of token-mean"),
        (["--regimes", "R7"], "regimes: 'R7' is none of R1, R2, R3, R4"),
        (["--planning", "begin"], "planning: 'begin' is none of begin_step, wrap"),
        (["--cp-gradient", "sum"], "cp_gradient: 'sum' is none of local, replicated-value, gath"),
        (
            ["--cp-gradient", "gathered", "--layouts", "D=2 M=2"],
            "cp_gradient gathered needs a layout with context parallelism, such as 'C=2 M=2', got "
            "D=2 M=2",
        ),
        (["--layouts", ";"], "names none"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
    ],
)
def test_the_command_explains_wrong_arguments(arguments, message):
    """Exit code 2 and what was expected, before any rank is started."""
    result = CliRunner().invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layout: [D=1]", "unknown option(s) layout; known ones: layouts, modes, regimes, plan"),
        ("- D=1", "expected a mapping of options, got list"),
        ("layouts: [", "cannot read"),
        ("layouts: [4]", "layouts[0]: Layout.parse: cannot read '4' in '4'; expected pairs like"),
        ("modes: {a: b}", "modes must be a list, got {'a': 'b'} of type dict"),
        ("modes: [3]", "modes[0] must be text, got 3 of type int"),
        ("packed: both", "packed must be true or false, got 'both'"),
        ("regimes: []", "regimes [] names none"),
    ],
)
def test_the_command_explains_a_wrong_file(tmp_path, text, message):
    """Exit code 2, the option and what was expected."""
    path = tmp_path / "verify.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["verify", "--config", str(path)])
    assert result.exit_code == 2
    assert message in result.output


def test_values_are_read_as_in_every_other_file(tmp_path):
    """Flags written as text, layouts as mappings, and the names of D and C that others use."""
    layouts = ["DP=2 CP=2 M=2", {"dp": "2", "cp": 2, "num_microbatches": "1e1"}]
    config = VerifyConfig.load(written(tmp_path, layouts=layouts, packed="off"), {})
    assert config.packed is False
    assert config.layouts == (Layout.parse("D=2 C=2 M=2"), Layout.parse("D=2 C=2 M=10"))
    overridden = VerifyConfig.load(None, {"layouts": "dp=4 cp=2"})
    assert overridden.layouts == (Layout.parse("D=4 C=2"),)


def test_flags_override_a_file(tmp_path):
    """What is on the command line; what is not comes from the file, then from the defaults."""
    path = written(tmp_path, layouts=["D=2 M=2", "C=2 M=2"], regimes="R2", packed=True)
    config = VerifyConfig.load(path, {"layouts": "C=4 M=1 ; C=4 M=1", "modes": None})
    assert config.layouts == (Layout.parse("C=4 M=1"),)
    assert config.regimes == ("R2",) and config.packed and len(config.modes) == 6
    assert not config.releases and config.layouts != VerifyConfig().layouts
    config = VerifyConfig.load(None, {"releases": "0.13.1"})
    assert config.releases == ("0.13.1",) and len(config.layouts) == 3
    assert VerifyConfig.load(path, {"packed": False}).cases() == [
        Case(Layout.parse(text), "R2", planning)
        for text in ("D=2 M=2", "C=2 M=2")
        for planning in ("begin_step", "wrap")
    ]


def test_the_files_in_configs():
    """verify_default.yaml is what runs without options; the others load and do what they say."""
    default = VerifyConfig.load(CONFIGS / "verify_default.yaml", {})
    assert default == VerifyConfig() and default.cases() == default_cases()
    packed = VerifyConfig.load(CONFIGS / "verify_packed.yaml", {}).cases()
    assert {case.form for case in packed} == {"cu_seqlens", "cu_seqlens_padded"}
    cases = VerifyConfig.load(CONFIGS / "verify_context_parallel.yaml", {}).cases()
    assert len(cases) == 4 * 4 * 3 * 2 and all(case.layout.cp > 1 for case in cases)


def test_conventions_are_run_where_they_differ():
    """A layout without context parallelism is there once."""
    layouts = [(Layout.parse("D=2 M=2"), "all"), (Layout.parse("C=2 M=2"), "all")]
    cases = default_cases(layouts, ["R1"], ["wrap"], cp_gradients=("replicated-value", "gathered"))
    assert [(str(case.layout), case.cp_gradient) for case in cases] == [
        ("D=2 M=2", "local"),
        ("C=2 M=2", "replicated-value"),
        ("C=2 M=2", "gathered"),
    ]


def test_the_table_shows_the_worst(capsys, monkeypatch):
    """Of the steps that share a row; NaN is worse than any number and counts as a failure."""
    monkeypatch.setenv("COLUMNS", "80")
    case = Case(Layout.parse("C=2 M=2"))
    results = [
        CaseResult(case, (ModeResult("token-mean", 2e-16, 0.0),)),
        CaseResult(Case(case.layout, form="cu_seqlens"), (ModeResult("token-mean", 3e-2, 0.0),)),
        CaseResult(Case(case.layout, "R3"), (ModeResult("token-mean", 1e-8, 1e-16),)),
        CaseResult(Case(case.layout, "R3"), (ModeResult("token-mean", float("nan"), 1e-16),)),
    ]
    outcome = Outcome(results, None, 1.0)
    assert not outcome.passed and len(outcome.failed) == 2
    print_table(outcome, ["token-mean"])
    printed = capsys.readouterr().out
    rows = [line.split()[2:] for line in printed.splitlines() if line.startswith(" C=2 M=2")]
    assert rows == [["R1", "3e-02", "0"], ["R3", "nan", "1e-16"]]
    assert "on padded rows and packed sequences (cu_seqlens)." in " ".join(printed.split())
    assert "2 of 4 cases above the bound" in printed
    assert "  C=2 M=2, R1, begin_step, cu_seqlens\n" in printed
