"""`explain`: its numbers against sums written out by hand, and against loops over tokens."""

from __future__ import annotations

import random

import pytest
import torch
from rich.console import Console

from megatron_lossagg import GlobalCounts, modes, token_weights
from megatron_lossagg.explain.buckets import length_buckets, reward_buckets, shortest_and_longest
from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.mode_weights import mode_labels
from megatron_lossagg.explain.rollouts import RolloutsBuilder
from megatron_lossagg.explain.showing.sentences import notes, reading_help
from megatron_lossagg.explain.showing.terminal import print_explanation
from megatron_lossagg.modes import registry as mode_registry

NORM = "seq-mean-token-sum-norm"
ALIKE = ["token-mean", "token-sum", "seq-mean-token-sum", NORM, f"{NORM}/seq-mean"]
# Length, reward and group. T = 30, B = 5, U = 2: the last one has no token that counts.
ROWS = [(2, 1, "a"), (8, 0, "a"), (4, 0, "b"), (11, 1, "b"), (5, 0, "b"), (0, 0, "c")]
# By hand: the part of the weight that each has.
SHARES = {
    **{label: [2 / 30, 8 / 30, 4 / 30, 11 / 30, 5 / 30, 0] for label in ALIKE},
    "seq-mean-token-mean": [1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 0],
    "unit-mean-token-sum": [2 / 30, 8 / 30, 4 / 30, 11 / 30, 5 / 30, 0],
    "unit-mean-token-mean": [1 / 10, 4 / 10, 1 / 10, 11 / 40, 5 / 40, 0],
    "unit-mean-seq-mean-token-mean": [1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6, 0],
}
# By hand, with advantages 1/2, -1/2, -1/3, 2/3, -1/3 and 0: up, down.
PUSH = {
    "token-mean": ((1 + 22 / 3) / 30, (4 + 4 / 3 + 5 / 3) / 30),
    "token-sum": (1 + 22 / 3, 4 + 4 / 3 + 5 / 3),
    "seq-mean-token-mean": ((1 / 2 + 2 / 3) / 5, (1 / 2 + 1 / 3 + 1 / 3) / 5),
    "unit-mean-token-mean": (2 / 40 + 22 / 120, 8 / 40 + (4 + 5) / 120),
}


def rollouts(rows):
    """Rows of (length, reward, group), of which reward and group may be None in all rows."""
    builder = RolloutsBuilder()
    for length, reward, group in rows:
        builder.add_length(length)
        if reward is not None:
            builder.add_reward(reward)
        if group is not None:
            builder.add_group(group)
    return builder.build("tokens", {"length": "'n'"})


def explanation_of(rows, **options):
    return Explanation.of("small.jsonl", rollouts(rows), **options)


def by_label(explanation):
    return {mode.label: mode for mode in explanation.modes}


def test_shares_by_hand():
    """Every mode's share of every sequence; they sum to 1."""
    shown = by_label(explanation_of(ROWS))
    assert set(shown) == set(SHARES) == set(mode_labels(True))
    for label, shares in SHARES.items():
        assert shown[label].shares.tolist() == pytest.approx(shares, rel=1e-14), label
        assert sum(shares) == pytest.approx(1, rel=1e-14)


def test_scale_by_hand():
    """The sum of all weights: T = 30, B = 5, L = 11, the longest, or what is given."""
    totals = {label: mode.total for label, mode in by_label(explanation_of(ROWS)).items()}
    expected = dict.fromkeys(SHARES, 1) | {"token-sum": 30, "seq-mean-token-sum": 6}
    expected["unit-mean-token-sum"] = 15
    expected |= {NORM: 30 / 11, f"{NORM}/seq-mean": 30 / 55}
    assert totals == pytest.approx(expected, rel=1e-14)
    given = by_label(explanation_of(ROWS, labels=[NORM], loss_scale_factor=60))
    assert given[NORM].total == pytest.approx(0.5, rel=1e-14)


def test_numbers_of_buckets_by_hand():
    """Share, weight of a token and of a sequence, for the wrong answers with a token."""
    explanation = explanation_of(ROWS)
    mode = by_label(explanation)["unit-mean-token-mean"]
    wrong, right = explanation.rewards
    assert wrong.label == "wrong (reward 0)" and right.label == "right (reward 1)"
    assert wrong.members.tolist() == [False, True, True, False, True, False]
    assert explanation.share(mode, wrong) == pytest.approx(4 / 10 + 1 / 10 + 5 / 40, rel=1e-14)
    assert explanation.share_of_responses(wrong) == pytest.approx(3 / 5, rel=1e-14)
    assert explanation.mean_length(wrong) == pytest.approx(17 / 3, rel=1e-14)
    assert explanation.token_weight(mode, wrong) == pytest.approx(0.625 / 17, rel=1e-14)
    assert explanation.sequence_weight(mode, wrong) == pytest.approx(0.625 / 3, rel=1e-14)
    assert explanation.relative_token_weight(mode, wrong) == pytest.approx(
        0.625 / 17 * 30, rel=1e-14
    )


def test_push_by_hand():
    """Up, down and the net of the shortest two, with advantages within each group."""
    explanation = explanation_of(ROWS, num_buckets=2)
    shown = by_label(explanation)
    for label, (up, down) in PUSH.items():
        push = explanation.push(shown[label])
        assert (push.up, push.down) == pytest.approx((up, down), rel=1e-14), label
        assert push.down_share == pytest.approx(down / (up + down), rel=1e-14)
    short = explanation.lengths[0]
    assert short.members.tolist() == [True, False, True, False, True, False]
    net = (2 / 2 - 4 / 3 - 5 / 3) / (1 + 22 / 3 + 7)
    assert explanation.net_push(shown["token-mean"], short) == pytest.approx(net, rel=1e-14)


@pytest.mark.parametrize(
    "rows",
    [
        [(2, 0.1, "a"), (3, 0.1, "a"), (4, 0.1, "a"), (5, 0.7, "b")],  # equal in each group
        [(2, 1, None), (3, 0, None)],
        [(2, None, "a"), (3, None, "a")],
        [(2, 1, "a"), (0, 0, "b"), (0, 1, "b")],  # different only where no token counts
    ],
)
def test_no_push_without_advantages(rows):
    """Equal rewards, no groups, no rewards, or nothing that counts: no number is invented."""
    explanation = explanation_of(rows)
    assert all(explanation.push(mode) is None for mode in explanation.modes)
    assert not any("push" in sentence for sentence in reading_help(explanation))


def test_families_differ_in_scale_alone():
    """Modes with the same shares are together; equal groups put the unit mean with its like."""
    families = [[mode.label for mode in family] for family in explanation_of(ROWS).families]
    assert [sorted(family) for family in families] == [
        sorted([*ALIKE, "unit-mean-token-sum"]),
        ["seq-mean-token-mean"],
        ["unit-mean-token-mean"],
        ["unit-mean-seq-mean-token-mean"],
    ]
    even = explanation_of([(2, 1, "a"), (8, 0, "a"), (4, 0, "b"), (11, 1, "b")])
    assert ["seq-mean-token-mean", "unit-mean-seq-mean-token-mean"] in [
        [mode.label for mode in family] for family in even.families
    ]


def test_a_registered_mode(monkeypatch):
    """It is shown with its own weights, and refused where they cannot be shared out."""
    own = modes.AggregationMode("own", lambda n_s, c: 1 / n_s.sqrt())  # inf where n_s = 0
    monkeypatch.setitem(mode_registry._MODES, "own", own)
    mode = by_label(explanation_of([(4, None, None), (0, None, None), (9, None, None)]))["own"]
    assert mode.shares.tolist() == pytest.approx([2 / 5, 0, 3 / 5], rel=1e-14)
    print_explanation(explanation_of(ROWS), Console(quiet=True))
    zero = modes.AggregationMode("own", lambda n_s, c: n_s * 0)
    monkeypatch.setitem(mode_registry._MODES, "own", zero)
    with pytest.raises(ValueError, match="the weights of own sum to 0.0, which cannot be shared"):
        explanation_of(ROWS)


def test_weights_are_those_of_the_library_and_of_loops():
    """Random rollouts: `token_weights` on their mask, and sums over tokens in plain Python."""
    rng = random.Random(3)
    rows = [(rng.randint(0, 9), rng.random(), rng.randint(0, 6)) for _ in range(40)]
    explanation = explanation_of(rows, loss_scale_factor=12)
    # Groups are numbered as they come.
    numbers = {group: k for k, group in enumerate(dict.fromkeys(g for *_, g in rows))}
    units = torch.tensor([numbers[group] for *_, group in rows])
    mask = torch.tensor([[int(t < length) for t in range(9)] for length, *_ in rows])
    tokens = [sum(n for n, _, g in rows if g == group) for group in numbers]
    seqs = [sum(n > 0 for n, _, g in rows if g == group) for group in numbers]
    counts = GlobalCounts(
        sum(n for n, *_ in rows),
        sum(n > 0 for n, *_ in rows),
        len(rows),
        torch.tensor(tokens),
        torch.tensor(seqs),
    )
    for mode in explanation.modes:
        name, _, semantics = mode.label.partition("/")
        weights = token_weights(
            mask,
            name,
            counts,
            loss_scale_factor=12,
            norm_semantics=semantics or "sum",
            unit_ids=units,
            weight_dtype=torch.float64,
        ).tolist()
        total = sum(w for row in weights for w in row)
        assert mode.total == pytest.approx(total, rel=1e-12)
        for row, of_token, share in zip(weights, mode.of_token, mode.shares, strict=True):
            assert max(row) == pytest.approx(of_token.item(), rel=1e-12)
            assert sum(row) / total == pytest.approx(share.item(), rel=1e-12)
        for bucket in (*explanation.lengths, *explanation.rewards, explanation.long):
            inside = [w for row, m in zip(weights, bucket.members, strict=True) if m for w in row]
            valid = [w for w in inside if w > 0]
            assert explanation.share(mode, bucket) == pytest.approx(sum(inside) / total, rel=1e-12)
            mean = sum(valid) / len(valid)
            assert explanation.token_weight(mode, bucket) == pytest.approx(mean, rel=1e-12)


def test_buckets_of_length():
    """About as many in each, equal lengths together, sequences without a token in none."""
    lengths = [5, 1, 2, 3, 4, 6, 7, 8, 9, 10, 0]
    buckets = length_buckets(rollouts([(n, None, None) for n in lengths]), 5)
    assert [b.label.replace("\N{EN DASH}", "-") for b in buckets] == [
        "1-2",
        "3-4",
        "5-6",
        "7-8",
        "9-10",
    ]
    assert [int(b.members.sum()) for b in buckets] == [2] * 5
    tied = length_buckets(rollouts([(n, None, None) for n in [3, 3, 3, 3, 9]]), 5)
    assert [(b.label, int(b.members.sum())) for b in tied] == [("3", 4), ("9", 1)]


def test_shortest_and_longest():
    """A tenth, rounded down, but at least one; never one without a token."""
    short, long = shortest_and_longest(rollouts([(n, None, None) for n in range(26)]))
    assert short.members.nonzero().flatten().tolist() == [1, 2]
    assert long.members.nonzero().flatten().tolist() == [24, 25]
    short, long = shortest_and_longest(rollouts([(0, None, None), (4, None, None)]))
    assert short.members.tolist() == long.members.tolist() == [False, True]


def test_buckets_of_reward():
    """Few rewards one by one, many by quantiles, which keep every sequence."""
    few = reward_buckets(rollouts([(1, r, None) for r in (0.5, -1, 2, 0.5)]))
    assert [b.label for b in few] == ["reward -1", "reward 0.5", "reward 2"]
    many = reward_buckets(rollouts([(1, r / 8, None) for r in range(8)]))
    assert [b.label for b in many][::3] == ["reward 0 to 0.125", "reward 0.75 to 0.875"]
    assert sum(int(b.members.sum()) for b in many) == 8
    signs = reward_buckets(rollouts([(1, r, None) for r in (-1, 1)]))
    assert [b.label for b in signs] == ["wrong (reward -1)", "right (reward 1)"]


def test_sentences_are_computed():
    """A long wrong answer of 14 beside a short right one of 2: 1/7, in one mode alone."""
    said = " ".join(reading_help(explanation_of([(14, 0, None), (2, 1, None)])))
    assert (
        "In seq-mean-token-mean a token of a long wrong answer (reward 0) weighs 1/7 of a token of "
        "a short right answer (reward 1); in token-mean as much."
    ) in said
    assert "the longest 10% hold 88% of the weight" in said  # 14 of 16
    assert "their part of the weight is 87.5% in token-mean and 50.0% in seq-mean" in said
    assert "their weights sum to 1, 16, 8, 1.14 and 0.571." in said
    longer = " ".join(reading_help(explanation_of([(30, 0, None), (2, 1, None)])))
    assert "weighs 1/15 of a token" in longer and "1/7" not in longer


def test_notes_say_what_was_assumed():
    """The unit, where L is from, and sequences that do not count."""
    said = " ".join(notes(explanation_of(ROWS)))
    assert "one global batch" in said and "L (loss_scale_factor) is 11, the longest" in said
    assert "without a token that counts: 1. B is the number of the others, 5." in said
    said = " ".join(notes(explanation_of(ROWS, loss_scale_factor=64)))
    assert "is 64." in said and "longest" not in said


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_cut_off_in_a_narrow_terminal(width):
    """Ten buckets on 60 columns: the table is split, every number is there once."""
    rng = random.Random(1)
    rows = [(rng.randint(1, 99_999), rng.random() - 2, rng.randint(0, 20)) for _ in range(200)]
    explanation = explanation_of(rows, num_buckets=10)
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    print_explanation(explanation, console)
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= width
    mode = explanation.modes[0]
    numbers = [f"{explanation.share(mode, bucket):.1%}" for bucket in explanation.lengths]
    shown = [w for line in text.splitlines() if "token-mean " in line for w in line.split()]
    assert set(numbers) <= set(shown)
