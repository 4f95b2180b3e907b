"""`explain`: the picture shows the numbers, labels its axes and keeps inside its frame."""

from __future__ import annotations

import random

import pytest
from matplotlib.colors import to_rgba

from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.rollouts import RolloutsBuilder
from megatron_lossagg.explain.showing.picture import COLORS, figure


def explanation(num_buckets=5, *, rewards=(0, 1), groups=True):
    rng = random.Random(5)
    builder = RolloutsBuilder()
    for _ in range(120):
        builder.add_length(rng.randint(1, 30_000))
        if rewards:
            builder.add_reward(rng.choice(rewards))
        if groups:
            builder.add_group(rng.randint(0, 12))
    rollouts = builder.build("tokens", {"length": "'n'"})
    return Explanation.of(f"{'long' * 30}.jsonl", rollouts, num_buckets=num_buckets)


def test_bars_are_the_shares():
    """One bar per family and bucket, of the height and the colour that the legend says."""
    shown = explanation()
    axes = figure(shown).axes
    panels = {
        "Share of the whole weight, by length": (shown.lengths, shown.share),
        "Share of the whole weight, by reward": (shown.rewards, shown.share),
        "Net push, by length": (shown.lengths, shown.net_push),
    }
    assert [axis.get_title() for axis in axes[1:]] == list(panels)
    for axis, (buckets, height) in zip(axes[1:], panels.values(), strict=True):
        assert len(axis.containers) == len(shown.families) == 4
        for bars, family, color in zip(axis.containers, shown.families, COLORS, strict=False):
            assert [bar.get_height() for bar in bars] == [height(family[0], b) for b in buckets]
            assert {bar.get_facecolor() for bar in bars} == {to_rgba(color)}
        assert [label.get_text() for label in axis.get_xticklabels()] == [b.label for b in buckets]


def test_curves_are_the_weights_of_a_token():
    """1 where every token is alike; else the mean of w over that of all tokens, by length."""
    shown = explanation()
    axis = figure(shown).axes[0]
    curves = [line.get_ydata() for line in axis.lines]
    assert curves[0] == pytest.approx(1, rel=1e-12)
    lengths = axis.lines[1].get_xdata()
    # seq-mean-token-mean: 1/(B n_s) over 1/T is (T/B)/n_s, and the mean over tokens alike.
    mean_length = shown.rollouts.num_tokens.double().mean().item()
    assert curves[1] == pytest.approx([mean_length / n for n in lengths], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "num_panels"),
    [
        ({}, 4),
        ({"num_buckets": 12, "rewards": [k / 7 - 3 for k in range(80)]}, 4),
        ({"groups": False}, 3),
        ({"rewards": (), "groups": False}, 2),
        ({"num_buckets": 1, "rewards": (0.5,)}, 2),
    ],
)
def test_nothing_is_cut_off(options, num_panels):
    """Each panel has a title and units; every text is inside the picture; the legend is there."""
    drawn = figure(explanation(**options))
    drawn.canvas.draw()
    panels = [axis for axis in drawn.axes if axis.axison]
    assert len(panels) == num_panels
    frame = drawn.bbox
    for axis in panels:
        assert axis.get_title() and axis.get_ylabel()
        assert "length" not in axis.get_title() or "tokens" in axis.get_xlabel()
        texts = [axis.title, axis.xaxis.label, axis.yaxis.label]
        if axis.containers:  # a log axis has ticks outside of what is drawn
            texts += axis.get_xticklabels()
            if not axis.get_xticklabels()[0].get_rotation():
                spans = [t.get_window_extent() for t in axis.get_xticklabels()]
                assert all(a.x1 < b.x0 for a, b in zip(spans, spans[1:], strict=False))
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
        assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
    box = drawn._suptitle.get_window_extent()
    assert frame.x0 <= box.x0 and box.x1 <= frame.x1
    legends = [*drawn.legends, *(axis.legend_ for axis in drawn.axes if axis.legend_)]
    [labels] = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    assert labels[0].startswith("token-mean") and labels[-1] == "share of the responses"
