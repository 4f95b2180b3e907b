"""Property: wherever a document gives a mode's formula, it is the text that the mode has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_lossagg.modes
from megatron_lossagg.modes import get_mode, mode_names
from megatron_lossagg.modes.length_power import formula_of

ROOT = Path(__file__).parents[2]
FORMULAS = {
    (name, semantics): formula
    for name in mode_names()
    for semantics, formula in zip(("sum", "seq-mean"), get_mode(name).formulas, strict=False)
}


def test_the_table_of_the_package():
    """Every mode has its row in the docstring of `modes`, with its weight and their sum."""
    row = re.compile(
        r'^    ([a-z-]+)(?:, "([a-z-]+)")? +w = (.+?) {2,}sum of w = (.+)$', re.MULTILINE
    )
    rows = {
        (name, semantics or "sum"): (weight, total)
        for name, semantics, weight, total in row.findall(megatron_lossagg.modes.__doc__)
    }
    assert rows == {key: (f.weight, f.sum_of_weights) for key, f in FORMULAS.items()}
    assert f"w = {formula_of('A').weight} " in megatron_lossagg.modes.__doc__


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readmes(readme):
    """The worked example's second column, and the weights of modes with units in the prose."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    row = re.compile(
        r'^\| `([a-z-]+)`(?:.{1,2}`norm_semantics="([a-z-]+)"`)? \| ([^|]+) \|', re.MULTILINE
    )
    table = text.split("<!-- worked-example -->")[1].split("\n\n")[0]
    rows = {(name, semantics or "sum"): weight for name, semantics, weight in row.findall(table)}
    without_units = {k: f.weight for k, f in FORMULAS.items() if not get_mode(k[0]).needs_units}
    assert rows == without_units
    for (name, _), formula in FORMULAS.items():
        if get_mode(name).needs_units:
            [told] = re.findall(
                rf"`{name}`[^`]*?w = ([^;\uff1b\u3002.`]*[^;\uff1b\u3002.`\s])", text
            )
            assert told == formula.weight
    assert formula_of("A").weight in text.split("`length-power-A`")[1][:60]
