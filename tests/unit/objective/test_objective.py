"""An objective as data: which weightings its terms need, its names, and that it can be copied."""

from __future__ import annotations

import copy
import pickle

import pytest

from megatron_lossagg import LossTerm
from megatron_lossagg.objective.compile.compiled import make_evaluation
from megatron_lossagg.objective.objective import Objective


def losses(output, microbatch):
    return output


def term(name, mode="token-mean", **options):
    return LossTerm(name, losses, mode, **options)


def test_terms_of_one_mode_and_mask_share_a_weighting():
    """Four terms, three weightings, that of `loss_mask` first wherever its term stands."""
    made = Objective.of(
        [
            term("a", mask_key="other_mask"),
            term("b", "seq-mean-token-mean"),
            term("c", mask_key="other_mask"),
            term("d", "seq-mean-token-mean", mask_key="other_mask"),
        ]
    )
    assert [(w.spec.loss_agg_mode, w.mask_key) for w in made.weightings] == [
        ("seq-mean-token-mean", "loss_mask"),
        ("token-mean", "other_mask"),
        ("seq-mean-token-mean", "other_mask"),
    ]
    assert made.weighting_of_term == (1, 0, 1, 2)
    assert made.mask_keys == ("loss_mask", "other_mask")


def test_only_the_first_weighting_of_the_main_mask_moves():
    """The fields that carry weights keep the order of the terms otherwise."""
    made = Objective.of(
        [term("a", mask_key="other_mask"), term("b"), term("c", "token-sum", mask_key="other_mask"),
         term("d", "token-sum")]
    )  # fmt: skip
    assert [(w.spec.loss_agg_mode, w.mask_key) for w in made.weightings] == [
        ("token-mean", "loss_mask"),
        ("token-mean", "other_mask"),
        ("token-sum", "other_mask"),
        ("token-sum", "loss_mask"),
    ]


def test_names_and_kinds():
    """The loss first, then terms, then metrics: sums apart from minima and maxima."""
    terms = [
        term("policy", metrics={"low": "min", "ratio": "tokens"}),
        term("kl", "token-sum", metrics={"high": "max", "k3": "units"}),
    ]
    made = Objective.of(terms)
    assert made.names == (("loss", "policy", "kl"), ("ratio", "k3"), ("low", "high"))
    assert [metric.kind for metric in made.metrics] == ["min", "sum", "max", "sum"]
    assert made.places_of_metric_sums == (0, 1)
    assert Objective.of(terms, reports_terms=False).names.values == ("loss",)


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ([], ValueError, "terms is empty"),
        ([losses], TypeError, "must be LossTerm objects, got function"),
        ([term("a"), term("a", "token-sum")], ValueError, r"share the name\(s\) a"),
        ([term("a", metrics={"b": "sum"}), term("b")], ValueError, r"share the name\(s\) b"),
    ],
)
def test_what_is_no_objective(terms, error, message):
    """It says what was passed."""
    with pytest.raises(error, match=message):
        Objective.of(terms)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_an_evaluation_has_an_objective_of_its_own(compile, copied):
    """Beside a copy of the objective it is the same one, as in a copy of an aggregator."""
    objective = Objective.of([term("a", metrics={"m": "max"})])
    both = copied([objective, make_evaluation(objective, compile=compile)])
    assert both[0] is both[1].objective is not objective
    assert both[0].names == objective.names and both[0].weightings == objective.weightings


def test_compile_is_a_flag():
    """A text would be true."""
    with pytest.raises(TypeError, match="compile"):
        make_evaluation(Objective.of([term("a")]), compile="no")
