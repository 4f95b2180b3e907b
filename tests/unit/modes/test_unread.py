"""Options that change nothing: a warning says so once, of those alone that somebody wrote."""

from __future__ import annotations

import warnings

import pytest
import torch
from one_process import model_config

from megatron_lossagg import (
    GlobalCounts,
    LossAggConfig,
    LossAggregator,
    LossTerm,
    ParallelGroups,
    agg_loss,
    register_mode,
    token_weights,
)
from megatron_lossagg.config.presets import PRESETS, preset_names
from megatron_lossagg.config.term_config import TermConfig
from megatron_lossagg.modes import unread
from megatron_lossagg.modes.registry import _MODES

NORM = "seq-mean-token-sum-norm"
LENGTH, SEMANTICS, COUNT = (
    {"loss_scale_factor": 4},
    {"norm_semantics": "seq-mean"},
    {"sequence_count": "nominal"},
)
MASK = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def a_new_process(monkeypatch):
    """Nothing has been told yet."""
    monkeypatch.setattr(unread, "_TOLD", set())


def losses(output, microbatch):
    return output


def of_aggregator(mode, **options):
    options = {"model_config": model_config(), "groups": ParallelGroups.single_process()} | options
    return LossAggregator(losses, loss_agg_mode=mode, **options)


def of_terms(mode, **options):
    """The term alone, in an aggregator that reports no counts."""
    report_counts = options.pop("report_counts", False)
    return LossAggregator(
        terms=[LossTerm("a", losses, mode, **options)],
        report_counts=report_counts,
        model_config=model_config(),
        groups=ParallelGroups.single_process(),
    )


def of_weights(mode, **options):
    return token_weights(MASK, mode, GlobalCounts(6, 2, 2), **options)


def of_config(mode, **options):
    return LossAggConfig(loss_agg_mode=mode, **options)


def of_term_config(mode, **options):
    return TermConfig(name="a", loss_agg_mode=mode, **options)


TAKERS = [of_aggregator, of_terms, of_weights, of_config, of_term_config]


def told(taker, mode, **options):
    """The options that warnings name, and that they are said where the caller's line is."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taker(mode, **options)
    assert all(w.category is UserWarning and w.filename == __file__ for w in caught)
    return [str(w.message).partition("=")[0] for w in caught]


@pytest.mark.parametrize("taker", TAKERS)
def test_what_the_mode_does_not_read(taker):
    """L and the semantics, with each who takes them; once, as long as the process lives."""
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert told(taker, mode, **LENGTH, **SEMANTICS) == ["loss_scale_factor", "norm_semantics"]
        assert told(taker, mode, **LENGTH, **SEMANTICS) == []


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("token-mean", {}),
        ("token-mean", {"norm_semantics": "sum", "sequence_count": "valid"}),
        ("token-mean", {"loss_scale_factor": None, "norm_semantics": None, "sequence_count": None}),
        ("seq-mean-token-sum", COUNT),
        ("length-power-0.5", COUNT),
        (NORM, LENGTH),
        (NORM, {**LENGTH, **SEMANTICS, **COUNT}),
    ],
)
def test_what_is_read_or_the_default(taker, mode, options):
    """No warning."""
    if taker is of_weights:
        options = {k: v for k, v in options.items() if v is not None} | options
    assert told(taker, mode, **options) == []


@pytest.mark.parametrize("taker", [of_aggregator, of_terms])
def test_the_count_of_sequences_is_read_by_others_too(taker):
    """By metrics over sequences or units and by report_counts; by a metric over tokens not."""
    for also in (
        {"report_counts": True},
        {"metrics": {"x": "sequences"}},
        {"metrics": {"x": "tokens", "y": "units"}},
    ):
        assert told(taker, "token-mean", **COUNT, **also) == []
    assert told(taker, "token-mean", **COUNT, metrics={"x": "tokens"}) == ["sequence_count"]
    assert told(taker, "token-sum", **COUNT) == ["sequence_count"]
    assert told(of_weights, NORM, **LENGTH, **COUNT) == ["sequence_count"]  # w = 1 / L


def test_the_text():
    """What, why nothing happens, and what to do."""
    with pytest.warns(UserWarning) as caught:
        of_weights("token-mean", **LENGTH, **COUNT)
    assert [str(w.message) for w in caught] == [
        "loss_scale_factor=4.0 changes nothing: loss_agg_mode='token-mean', whose weights are "
        "1 / T, does not read it. Leave it out, or take a mode that divides by L: "
        "seq-mean-token-sum-norm.",
        "sequence_count='nominal' changes nothing: loss_agg_mode='token-mean', whose weights are "
        "1 / T, does not read it. Nor does anything else here: a metric over 'sequences' or "
        "'units', or report_counts. Leave it out.",
    ]


@pytest.mark.parametrize("name", preset_names())
def test_presets_and_files_do_not_warn(name, tmp_path):
    """A preset sets options for several modes; nor does a file that was written of it."""
    path = tmp_path / "a.yaml"
    for mode in PRESETS[name].modes or (PRESETS[name].options["loss_agg_mode"],):
        needed = LENGTH if mode == NORM else {}
        own = {"loss_agg_mode": mode} if PRESETS[name].modes else {}
        terms = {"terms": [{"name": "p"}, {"name": "kl", "loss_agg_mode": "token-mean"}]}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for options in (own | needed, own | needed | terms):
                config = LossAggConfig.preset(name, **options)
                config.to_yaml(path)
                read = LossAggConfig.from_yaml(path)
                assert read == config
                functions = {"p": losses, "kl": losses} if read.terms else losses
                LossAggregator.from_config(
                    functions, read, model_config(), groups=ParallelGroups.single_process()
                )


def test_a_preset_beside_what_it_does_not_set():
    """What the user writes beside it is the user's."""
    with pytest.warns(UserWarning, match="loss_scale_factor=4.0 changes nothing"):
        config = LossAggConfig.preset("dapo", **LENGTH)
    assert config.loss_scale_factor == 4.0  # kept: another mode may be chosen later
    assert LossAggConfig.preset("verl-2026-08", norm_semantics=None).main_spec == (
        LossAggConfig.preset("verl-2026-08").main_spec
    )


@pytest.mark.parametrize("taker", [of_aggregator, of_terms, of_weights])
def test_modes_of_ones_own(taker, monkeypatch):
    """They read all options unless they say otherwise."""
    monkeypatch.setattr("megatron_lossagg.modes.registry._MODES", dict(_MODES))
    register_mode("reads-all", lambda n_s, c: c.num_seqs)
    register_mode("reads-b", lambda n_s, c: c.num_seqs, reads=["sequence_count"])
    assert told(taker, "reads-all", **LENGTH, **SEMANTICS, **COUNT) == []
    assert told(taker, "reads-b", **LENGTH, **COUNT) == ["loss_scale_factor"]


def test_the_drop_in_never_warns():
    """Callers of verl's function pass all options with every mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("token-mean", "seq-mean-token-sum", NORM):
            agg_loss(MASK, MASK, mode, loss_scale_factor=4, norm_semantics="seq-mean")


@pytest.mark.parametrize("taker", TAKERS)
def test_wrong_options_still_raise(taker):
    """Also where the mode would not read them."""
    for options, error in (
        ({"loss_scale_factor": 0}, ValueError),
        ({"loss_scale_factor": True}, TypeError),
        ({"norm_semantics": "mean"}, ValueError),
        ({"sequence_count": "rows"}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            taker("token-mean", **options)
