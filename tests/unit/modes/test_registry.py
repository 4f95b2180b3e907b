"""`register_mode`: what it takes, and when a name may be registered again."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys

import pytest
import torch

from megatron_lossagg import GlobalCounts, register_mode
from megatron_lossagg.modes import ModeSpec, get_mode
from megatron_lossagg.modes.registry import _MODES

SOURCE = """
from megatron_lossagg import register_mode
register_mode("own", lambda n_s, c: {value} / c.num_seqs)
"""
COUNTS = GlobalCounts(num_tokens=6, num_valid_seqs=2, num_seqs=3)


@pytest.fixture(autouse=True)
def forget_own_modes():
    before = dict(_MODES)
    yield
    _MODES.clear()
    _MODES.update(before)


def factor():
    spec = ModeSpec("own")
    return spec.mode.sequence_factor(torch.ones(2), spec.inputs(COUNTS, torch.device("cpu"))).item()


def execute(value, filename="<cell>", **names):
    exec(compile(SOURCE.format(value=value), filename, "exec"), names)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"__name__": "__main__"}, {"__name__": "__main__", "filename": "<another cell>"}),
        ({"__name__": "a", "__file__": "/x/a.py"}, {"__name__": "a", "__file__": "/x/a.py"}),
        ({"__name__": "__main__", "__file__": "/x/a.py"}, {"__name__": "a", "__file__": "/x/a.py"}),
    ],
    ids=["cells of a notebook", "a module again", "a script and its module"],
)
def test_its_own_place_replaces_a_mode(first, again):
    """Also with an edited function: the new one counts."""
    execute(4, **first)
    assert factor() == 2.0
    execute(4, **again)
    execute(8, **again)
    assert factor() == 4.0


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (("a", "/x/a.py"), ("b", "/x/b.py")),
        (("__main__", "/x/a.py"), ("__main__", "/x/b.py")),
        (("__main__", None), ("b", "/x/b.py")),
    ],
)
def test_another_place_does_not(first, other):
    """The message names both places, and the first mode stays."""

    def names(module, file):
        return {"__name__": module} | ({} if file is None else {"__file__": file})

    execute(4, **names(*first))
    with pytest.raises(ValueError, match="'own' exists already: ") as caught:
        execute(8, **names(*other))
    for module, file in (first, other):
        assert f"{module} ({file or 'no file'}), line 3" in str(caught.value)
    assert factor() == 2.0


def test_two_lines_of_one_run_are_two_places():
    """A copy that kept the name is a mistake, also in one file."""
    source = SOURCE.format(value=4) + 'register_mode("own", lambda n_s, c: n_s)\n'
    with pytest.raises(
        ValueError, match=r"__main__ \(no file\), line 3, .* line 4. Choose another"
    ):
        exec(compile(source, "<cell>", "exec"), {"__name__": "__main__"})


def test_a_reloaded_module(monkeypatch, tmp_path):
    """`importlib.reload` after an edit, as notebooks do by themselves."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "reloaded_modes.py").write_text(SOURCE.format(value=4))
    module = importlib.import_module("reloaded_modes")
    (tmp_path / "reloaded_modes.py").write_text("\n" + SOURCE.format(value=12))
    importlib.reload(module)
    assert factor() == 6.0


def test_a_built_in_mode_is_never_replaced():
    """From no place."""
    for name in ("token-mean", "length-power-2"):
        with pytest.raises(ValueError, match=f"'{name}' exists already; choose another name"):
            register_mode(name, lambda n_s, c: n_s)


def test_specs_are_pickled_and_copied_by_name():
    """Functions may be lambdas, which pickle cannot write."""
    register_mode("own", lambda n_s, c: n_s, checksum=lambda c: c.num_tokens)
    for spec in (ModeSpec("own", loss_scale_factor=3), ModeSpec("length-power-0.5")):
        for other in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), copy.copy(spec)):
            assert other == spec and hash(other) == hash(spec) and repr(other) == repr(spec)
            assert other.mode.name == spec.loss_agg_mode
    with pytest.raises(AttributeError, match="lambda|local object"):
        pickle.dumps(get_mode("own").sequence_factor)


def test_a_formula_of_ones_own():
    """Shown where it was given; else the module that computes it is named."""
    untold = register_mode("untold", lambda n_s, c: n_s, checksum=lambda c: c.num_tokens)
    assert untold.formula.weight == f"its function in {__name__} (no formula given)"
    assert untold.formula.sum_of_weights == (
        f"what its checksum in {__name__} computes (no formula given)"
    )
    told = register_mode(
        "told", lambda n_s, c: n_s, weight="n_s", sum_of_weights="sum of n_s^2", reads=()
    )
    assert (told.formula.weight, told.formula.sum_of_weights) == ("n_s", "sum of n_s^2")
    assert untold.reads("norm_semantics") and not told.reads("norm_semantics")
    with pytest.raises(
        ValueError, match="reads has temperature; the options of a mode are loss_sc"
    ):
        register_mode("x", lambda n_s, c: n_s, reads=["temperature"])
