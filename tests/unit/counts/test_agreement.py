"""What differs between ranks is told by option, value and rank."""

from __future__ import annotations

from megatron_lossagg.counts.agreement import differences


def test_equal_options_differ_in_nothing():
    """Whatever the ranks are called."""
    assert differences([{"a": "1", "b": "2"}] * 3, [0, 4, 8]) == []


def test_each_option_names_its_values_and_their_ranks():
    """Global ranks; an option that a rank does not have at all is absent there."""
    found = differences(
        [{"mode": "'x'", "L": "4", "same": "1"}, {"mode": "'y'", "same": "1"}, {"mode": "'x'"}],
        [2, 3, 7],
    )
    assert found == [
        "mode is 'x' on ranks 2, 7 and 'y' on rank 3",
        "L is 4 on rank 2 and absent on ranks 3, 7",
        "same is 1 on ranks 2, 3 and absent on rank 7",
    ]


def test_many_ranks_are_not_all_listed():
    """A job of thousands gets a message of one screen."""
    [text] = differences([{"a": "1"}] * 1000 + [{"a": "2"}], range(1001))
    assert text == "a is 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7, ... and 2 on rank 1000"
