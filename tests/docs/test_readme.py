"""Property: the numbers and commands in the READMEs are those that the code gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lossagg import GlobalCounts, token_weights
from megatron_lossagg.modes import get_mode, mode_names

ROOT = Path(__file__).parents[2]
READMES = ["README.md", "README.zh-CN.md"]

# A long wrong answer of 8 tokens (loss +1 each) beside a short right one of 2 (loss -1 each).
MASK = torch.tensor([[1] * 8, [1, 1] + [0] * 6])
LOSSES = torch.tensor([[1.0] * 8, [-1.0] * 8], dtype=torch.float64)
L = 16


def worked_example(readme: str) -> list[list[str]]:
    """Rows of the table that follows the marker, as cells."""
    text = (ROOT / readme).read_text(encoding="utf-8").split("<!-- worked-example -->")[1]
    lines = [line for line in text.strip().split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("readme", READMES)
def test_worked_example(readme):
    """Every number of the table: weight per token and per sequence of both answers, and J."""
    rows = worked_example(readme)
    assert {row[0].split("`")[1] for row in rows} == {
        name for name in mode_names() if not get_mode(name).needs_units
    }
    assert len(rows) == 6
    for mode_cell, _, long_cell, short_cell, value in rows:
        mode = mode_cell.split("`")[1]
        semantics = "seq-mean" if 'norm_semantics="seq-mean"' in mode_cell else "sum"
        weights = token_weights(
            MASK,
            mode,
            GlobalCounts(num_tokens=10, num_valid_seqs=2, num_seqs=2),
            loss_scale_factor=L,
            norm_semantics=semantics,
            weight_dtype=torch.float64,
        )
        for row, cell in enumerate((long_cell, short_cell)):
            per_token, in_all = (float(number) for number in cell.split(","))
            assert weights[row, 0].item() == pytest.approx(per_token, rel=1e-12)
            assert weights[row].sum().item() == pytest.approx(in_all, rel=1e-12)
        assert (weights * LOSSES).sum().item() == pytest.approx(float(value), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("readme", READMES)
def test_pictures_and_links_exist(readme):
    """Every relative link and picture points to a file of the repository."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert targets
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_make_targets_exist():
    """The READMEs name no make target that the Makefile lacks."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for readme in READMES:
        text = (ROOT / readme).read_text(encoding="utf-8")
        for target in re.findall(r"(?:^|`|: )make ([a-z]+)\b", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("readme", READMES)
def test_the_bench_example_is_the_file(readme):
    """The README shows `examples/check_own_loss.py` as it is, without its docstring."""
    code = (ROOT / "examples" / "check_own_loss.py").read_text(encoding="utf-8")
    code = code.split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (ROOT / readme).read_text(encoding="utf-8")


def test_the_bench_example_runs():
    """It prints J twice, equal, and a relative error of the whole model's gradient near 1e-16."""
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "check_own_loss.py"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    losses, error = result.stdout.strip().splitlines()
    got, expected = map(float, losses.split())
    assert got == pytest.approx(expected, rel=1e-12)
    assert float(error) <= 1e-12
