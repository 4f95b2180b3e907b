"""A mode's text and its code: the formula, evaluated, is the factor and the checksum."""

from __future__ import annotations

import ast
import operator

import pytest
import torch

from megatron_lossagg import GlobalCounts
from megatron_lossagg.modes import ModeOptions, ModeSpec, mode_names
from megatron_lossagg.modes.options import OPTION_NAMES

L = 16.0
# The 3 of 7 rows that have a token, of the units 0, 0 and 2 of 3.
LENGTHS = torch.tensor([5.0, 2.0, 4.0], dtype=torch.float64)
UNIT_OF_SEQ = torch.tensor([0, 0, 2])
COUNTS = GlobalCounts(11, 3, 7, torch.tensor([7, 0, 4]), torch.tensor([2, 0, 1]))
MODES = [*mode_names(), "length-power-0", "length-power-0.75", "length-power-4"]
VARIANTS = [(mode, "sum") for mode in MODES] + [("seq-mean-token-sum-norm", "seq-mean")]
_OPERATORS = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def evaluate(text, symbols):
    """The number that a formula of symbols, numbers and + * / ^ stands for."""

    def value(node):
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return symbols[node.id]
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](value(node.operand))
        return _OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text.replace("^", "**"), mode="eval"))


def symbols(sequence_count, seq):
    """Counted by hand from the sequences above."""
    is_valid = sequence_count == "valid"
    unit = UNIT_OF_SEQ[seq]
    return {
        "T": 11,
        "B": 3 if is_valid else 7,
        "B_valid": 3,
        "U": 2 if is_valid else 3,
        "U_valid": 2,
        "L": L,
        "n_s": [5, 2, 4][seq],
        "T_u": [7, 0, 4][unit],
        "B_u": [2, 0, 1][unit],
    }


def factors(spec):
    units = UNIT_OF_SEQ if spec.needs_units else None
    inputs = spec.inputs(COUNTS, torch.device("cpu"), units)
    return spec.mode.sequence_factor(LENGTHS, inputs).expand(3)


def make(mode, **options):
    return ModeSpec(mode, **{"loss_scale_factor": L, **options})


@pytest.mark.parametrize("sequence_count", ["valid", "nominal"])
@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
def test_text_is_what_the_code_computes(mode, norm_semantics, sequence_count):
    """Weight of each sequence's tokens and sum of all weights, in every variant."""
    spec = make(mode, norm_semantics=norm_semantics, sequence_count=sequence_count)
    expected = [
        evaluate(spec.formula.weight, symbols(sequence_count, seq)) for seq in range(len(LENGTHS))
    ]
    assert factors(spec).tolist() == pytest.approx(expected, rel=1e-14)
    total = spec.checksum(COUNTS)
    if spec.formula.sum_of_weights is None:
        assert total is None
        return
    told = evaluate(spec.formula.sum_of_weights, symbols(sequence_count, 0))
    assert total.item() == pytest.approx(told, rel=1e-14)


OTHERS = {
    "loss_scale_factor": 4.0,
    "norm_semantics": "seq-mean",
    "sequence_count": "nominal",
}


@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize(("mode", "norm_semantics"), VARIANTS)
def test_a_mode_reads_what_it_says(mode, norm_semantics, option):
    """Another value of an option changes the weights, if and only if the mode declares it."""
    options = {"norm_semantics": norm_semantics}
    spec = make(mode, **options)
    other = OTHERS[option] if OTHERS[option] != norm_semantics else "sum"
    changed = make(mode, **(options | {option: other}))
    assert (option in spec.formula.reads) == (not torch.equal(factors(spec), factors(changed)))
    assert set(OTHERS) == set(OPTION_NAMES)


def test_what_a_mode_does_not_read_is_no_part_of_its_spec():
    """Terms that differ in it alone share one weight tensor; B is kept for metrics."""
    plain = ModeSpec("token-mean")
    assert plain == ModeSpec("token-mean", loss_scale_factor=4, norm_semantics="seq-mean")
    assert plain != ModeSpec("token-mean", sequence_count="nominal")
    assert ModeSpec.of("token-mean", ModeOptions(sequence_count="valid")) == plain
