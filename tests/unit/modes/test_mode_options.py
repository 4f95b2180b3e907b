"""`ModeOptions`: texts and enums are one thing, None is the default, files get plain values."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from megatron_lossagg.config.term_config import TermConfig
from megatron_lossagg.modes import ModeOptions, ModeSpec, NormSemantics, SequenceCount

CHOICES = [*NormSemantics, *SequenceCount]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_its_text(choice):
    """It compares, hashes, prints and formats so, on every Python."""
    text = choice.value
    assert choice == text and hash(choice) == hash(text) and {text: 1}[choice] == 1
    assert (str(choice), repr(choice), f"{choice}") == (text, repr(text), text)
    assert pickle.loads(pickle.dumps(choice)) is choice and copy.deepcopy(choice) is choice


def test_texts_and_members_are_accepted_alike():
    """Whichever was passed, the field is the member; the plain values are texts and floats."""
    texts = ModeOptions(
        loss_scale_factor=np.int64(4), norm_semantics="seq-mean", sequence_count="nominal"
    )
    members = ModeOptions(
        loss_scale_factor=4.0,
        norm_semantics=NormSemantics.SEQ_MEAN,
        sequence_count=SequenceCount.NOMINAL,
    )
    assert texts == members and texts.norm_semantics is NormSemantics.SEQ_MEAN
    plain = {"loss_scale_factor": 4.0, "norm_semantics": "seq-mean", "sequence_count": "nominal"}
    assert texts.mode_options == plain == texts.not_default
    assert {type(value) for value in texts.mode_options.values()} == {float, str}


def test_what_was_not_given_is_none():
    """A spec has the defaults then, and is that of whoever wrote them."""
    options = ModeOptions()
    assert set(options.mode_options.values()) == {None} and options.not_default == {}
    assert ModeOptions(norm_semantics="sum", sequence_count="valid").not_default == {}
    spec = ModeSpec.of("token-sum", options)
    assert (spec.norm_semantics, spec.sequence_count) == ("sum", "valid")
    assert spec == ModeSpec("token-sum", norm_semantics="sum", sequence_count="valid")


def test_files_get_plain_values():
    """In a term's own order: its name first."""
    term = TermConfig(name="a", loss_agg_mode="seq-mean-token-sum", sequence_count="nominal")
    values = term.to_dict()
    assert list(values)[:2] == ["name", "loss_agg_mode"] and TermConfig(**values) == term
    assert type(values["sequence_count"]) is str and values["norm_semantics"] is None
