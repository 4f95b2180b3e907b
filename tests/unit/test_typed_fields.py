"""The reader of mappings: what is a number, a flag and a text, and how mistakes are named."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_lossagg.testing import Layout
from megatron_lossagg.typed_fields import check_flags, read_dataclass, set_option


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 1e-3
    steps: int = 1
    is_fused: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    optimizer: Optimizer = Optimizer()
    stages: tuple[Optimizer, ...] = ()
    rate: float | Optimizer = 1.0
    limit: int | None = None
    layout: Layout = Layout()
    texts: Mapping[str, str] = field(default_factory=dict)
    anything: Any = None


def run_of(text: str) -> Run:
    return read_dataclass(Run, {"name": "a", **yaml.safe_load(text)})


@pytest.mark.parametrize(
    ("text", "number"),
    [("2e3", 2e3), ("'4'", 4.0), ("1", 1.0), ("-1e-2", -0.01), (".inf", math.inf), ("1_0", 10.0)],
)
def test_numbers(text, number):
    """At the top, below a section, in a list and in a union."""
    run = run_of(f"optimizer: {{lr: {text}}}\nstages: [{{lr: {text}}}]\nrate: {text}")
    assert run.optimizer.lr == run.stages[0].lr == run.rate == number
    assert type(run.optimizer.lr) is float


@pytest.mark.parametrize("text", ["1e3", "1000", "'1000'", "1000.0", "1.0e+3", "1_000"])
def test_whole_numbers(text):
    """Also where YAML has text or a float for them."""
    run = run_of(f"limit: {text}\noptimizer: {{steps: {text}}}")
    assert run.limit == run.optimizer.steps == 1000 and type(run.limit) is int


def test_numpys_numbers_are_numbers():
    """And a large int keeps every digit, as number or text."""
    values = {"steps": np.int32(3), "lr": np.float32(0.5)}
    assert read_dataclass(Optimizer, values) == Optimizer(steps=3, lr=0.5)
    for value in (2**53 + 1, str(2**53 + 1)):
        assert read_dataclass(Optimizer, {"steps": value}).steps == 2**53 + 1


@pytest.mark.parametrize("text", ["true", "True", "'true'", "yes", "'YES'", "on", "' on '"])
def test_flags_that_are_set(text):
    """What YAML reads as true, also in quotes."""
    assert run_of(f"optimizer: {{is_fused: {text}}}").optimizer.is_fused is True


@pytest.mark.parametrize("text", ["false", "False", "'false'", "no", "'off'", "off", "'No'"])
def test_flags_that_are_not_set(text):
    """No text is true because it is not empty."""
    assert run_of(f"optimizer: {{is_fused: {text}}}").optimizer.is_fused is False


def test_what_else_a_field_may_be():
    """None where the type has it, mappings, anything; what is built already; text of a layout."""
    run = run_of("limit: null\ntexts: {a: b}\nanything: [1, x]\nrate: {lr: 1e-1}\nlayout: DP=2 M=4")
    assert (run.limit, run.texts, run.anything) == (None, {"a": "b"}, [1, "x"])
    assert run.rate == Optimizer(lr=0.1) and run.layout == Layout(dp=2, num_microbatches=4)
    assert run_of("layout: {dp: '2', sequence_parallel: 'no'}").layout == Layout(dp=2)
    built = {"name": "a", "rate": Optimizer(), "stages": (Optimizer(),), "layout": Layout(dp=3)}
    assert read_dataclass(Run, built) == Run(**built)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lr: fast}", "optimizer.lr must be a number, got 'fast' of type str."),
        ("optimizer: {lr: .nan}", "optimizer.lr must be a number, got nan of type float."),
        ("optimizer: {lr: 'nan'}", "optimizer.lr must be a number, got 'nan' of type str."),
        ("optimizer: {lr: true}", "optimizer.lr must be a number, got True of type bool."),
        ("optimizer: {lr: null}", "optimizer.lr must be a number, got None of type NoneType."),
        ("optimizer: {lr: [1]}", "optimizer.lr must be a number, got [1] of type list."),
        (f"optimizer: {{lr: 1{'0' * 400}}}", "optimizer.lr must be a number, got 1000"),
        ("limit: 1.5", "limit must be a whole number, got 1.5 of type float."),
        ("limit: few", "limit must be a whole number, got 'few' of type str."),
        ("limit: 1e30", "limit must be a whole number, got '1e30' of type str."),
        ("limit: .inf", "limit must be a whole number, got inf of type float."),
        ("limit: true", "limit must be a whole number, got True of type bool."),
        ("limit: {a: 1}", "limit must be a whole number, got {'a': 1} of type dict."),
        ("stages: [{is_fused: 1}]", "stages[0].is_fused must be true or false, got 1 of type int."),
        ("stages: [{is_fused: maybe}]", "stages[0].is_fused must be true or false, got 'maybe'"),
        ("stages: [{is_fused: null}]", "stages[0].is_fused must be true or false, got None"),
        ("stages: {lr: 1}", "stages must be a list, got {'lr': 1} of type dict."),
        ("stages: lr", "stages must be a list, got 'lr' of type str."),
        ("stages: [{name: x}]", "stages.x: unknown option(s) name; known ones: lr, steps, is_fus"),
        ("name: 2", "name must be text, got 2 of type int; put it in quotes if it is a name."),
        ("name: on", "name must be text, got True of type bool; put it in quotes"),
        ("texts: {a: 1}", "texts.a must be text, got 1 of type int"),
        ("texts: [a]", "texts must be a mapping, got ['a'] of type list."),
        ("optimizer: 3", "optimizer: expected a mapping of options, got int."),
        ("optimizer: {x: 1, 2: 1}", "optimizer: unknown option(s) 2, x; known ones: lr, steps"),
        ("layout: 4", "layout: Layout.parse: cannot read '4' in '4'; expected pairs like 'PP=2 "),
        ("layout: {dp: 0}", "Layout: dp must be an int of at least 1, got 0"),
    ],
)
def test_mistakes_are_named(text, message):
    """The option by its full name, the value and its type, and what was expected."""
    with pytest.raises(ValueError, match=re.escape(message)):
        run_of(text)


def test_required_options():
    """Those without a default, all of them named."""
    with pytest.raises(ValueError, match=r"^missing option\(s\) name\.$"):
        read_dataclass(Run, {"limit": 3})
    with pytest.raises(ValueError, match="^expected a mapping of options, got NoneType"):
        read_dataclass(Run, None)


@pytest.mark.parametrize("value", ["false", "", 0, 1, None, np.True_])
def test_constructors_take_flags_alone(value):
    """In Python 'false' is true, so nothing but True and False is taken there."""
    check_flags(a=True, b=False)
    with pytest.raises(TypeError, match="b must be True or False, got"):
        check_flags(a=True, b=value)
    with pytest.raises(TypeError, match="sequence_parallel must be True or False, got"):
        Layout(tp=2, sequence_parallel=value)


def test_options_are_set_by_their_dotted_place():
    """Sections that are missing are made; an entry of a list is addressed by its name."""
    values = {"terms": [{"name": "a"}, {"name": "b", "size": {"x": 1}}]}
    set_option(values, "optimizer.lr", "1e-3")
    set_option(values, "terms.b.size.x", 2)
    set_option(values, "steps", 5)
    assert values == {
        "terms": [{"name": "a"}, {"name": "b", "size": {"x": 2}}],
        "optimizer": {"lr": "1e-3"},
        "steps": 5,
    }


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("terms.c.size", "Cannot set terms.c.size: there is no c there, only a. Add it where"),
        ("steps.more", "Cannot set steps.more: steps is no section."),
        ("terms.size", "Cannot set terms.size: name the entry of terms and its option."),
    ],
)
def test_places_that_are_not_there_are_named(dotted, message):
    """Nothing is set then."""
    values = {"terms": [{"name": "a"}], "steps": 3}
    with pytest.raises(ValueError, match=re.escape(message)):
        set_option(values, dotted, 1)
    assert values == {"terms": [{"name": "a"}], "steps": 3}
