"""The picture: weight of a token by length, shares by length and reward, and the net push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from megatron_lossagg.explain.buckets import Bucket, length_buckets
from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.mode_weights import ModeWeights
from megatron_lossagg.explain.showing.sentences import singular

# Okabe and Ito's palette, which people with colour-blindness can tell apart; markers and hatches
# tell the modes apart without any colour.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "oo")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GREY = "#5A5A5A"
_CURVE_POINTS = 24
# With more bars their numbers would run into each other.
_MAX_NUMBERED_BARS = 8
# What fits below an axis in one line; more is slanted.
_MAX_LABEL_CHARACTERS = 55


def draw(explanation: Explanation) -> bytes:
    """A PNG of 1364 pixels' width; see `figure`."""
    buffer = BytesIO()
    figure(explanation).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def figure(explanation: Explanation) -> Any:
    """A matplotlib figure of two to four panels, by what the rollouts have.

    Args:
        explanation: what to draw.

    Returns:
        A `matplotlib.figure.Figure`, drawn and not yet saved.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "the picture needs matplotlib: pip install matplotlib, or pass --no-picture"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels: list[Callable[[Any, Explanation], None]] = [_token_weight, _share_by_length]
    if len(explanation.rewards) > 1:
        panels.append(_share_by_reward)
    if explanation.has_push:
        panels.append(_net_push)
    rows = (len(panels) + 1) // 2
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)  # inches
    with matplotlib.rc_context({"font.size": 11, "hatch.linewidth": 0.6}):
        result = Figure(figsize=(12.4, 1.6 + 3.9 * rows), layout=layout)
        FigureCanvasAgg(result)
        axes = [result.add_subplot(rows, 2, place + 1) for place in range(len(panels))]
        for axis, panel in zip(axes, panels, strict=True):
            panel(axis, explanation)
            axis.grid(axis="y", color="#E0E0E0", lw=0.7)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        name = explanation.source
        name = name if len(name) <= 60 else f"...{name[-57:]}"
        result.suptitle(
            f"Who gets the weight? {name}, {len(explanation.rollouts.num_tokens):,} responses",
            fontsize=14,
        )
        if len(panels) % 2:  # the legend takes the empty place
            empty = result.add_subplot(rows, 2, 2 * rows)
            empty.set_axis_off()
            empty.legend(handles=_legend_handles(explanation), loc="center", frameon=False)
        else:
            result.legend(
                handles=_legend_handles(explanation),
                loc="outside lower center",
                ncols=2,
                fontsize=10,
                frameon=False,
            )
    return result


def _legend_handles(explanation: Explanation) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(
            facecolor=COLORS[place % len(COLORS)],
            hatch=HATCHES[place % len(HATCHES)],
            edgecolor="white",
            label=_family_label([mode.label for mode in family]),
        )
        for place, family in enumerate(explanation.families)
    ]
    handles.append(Line2D([], [], color="black", lw=2, label="share of the responses"))
    return handles


def _family_label(labels: list[str]) -> str:
    """Names of modes, at most two a line."""
    lines = [", ".join(labels[start : start + 2]) for start in range(0, len(labels), 2)]
    return ",\n".join(lines)


def _token_weight(axis: Any, explanation: Explanation) -> None:
    unit, one = explanation.rollouts.unit, singular(explanation)
    buckets = length_buckets(explanation.rollouts, _CURVE_POINTS)
    lengths = [explanation.mean_length(bucket) for bucket in buckets]
    for place, family in enumerate(explanation.families):
        weights = [explanation.relative_token_weight(family[0], bucket) for bucket in buckets]
        axis.plot(
            lengths,
            weights,
            color=COLORS[place % len(COLORS)],
            marker=MARKERS[place % len(MARKERS)],
            ms=5,
            lw=2,
            mew=0,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain_log_ticks(axis.xaxis, lambda value: f"{value:,.0f}")
    _plain_log_ticks(axis.yaxis, lambda value: f"{value:g}")
    axis.set_title(f"Weight of one {one}, by length of its response")
    axis.set_xlabel(f"length of the response ({unit}, log scale)")
    axis.set_ylabel(f"weight of a {one}\n(average {one} = 1, log scale)")


def _plain_log_ticks(axis: Any, text: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _share_by_length(axis: Any, explanation: Explanation) -> None:
    _grouped_bars(axis, explanation, explanation.lengths, explanation.share)
    _mark_share_of_responses(axis, explanation, explanation.lengths)
    axis.set_title("Share of the whole weight, by length")
    axis.set_xlabel(f"length of the response ({explanation.rollouts.unit})")
    axis.set_ylabel("share of the weight")


def _share_by_reward(axis: Any, explanation: Explanation) -> None:
    _grouped_bars(axis, explanation, explanation.rewards, explanation.share, with_numbers=True)
    _mark_share_of_responses(axis, explanation, explanation.rewards)
    axis.set_title("Share of the whole weight, by reward")
    axis.set_ylabel("share of the weight")


def _net_push(axis: Any, explanation: Explanation) -> None:
    _grouped_bars(axis, explanation, explanation.lengths, explanation.net_push)
    axis.axhline(0, color=_GREY, lw=1)
    axis.set_title("Net push, by length")
    axis.set_xlabel(f"length of the response ({explanation.rollouts.unit})")
    axis.set_ylabel("net part of the whole push\n(above 0: made likelier)")


def _grouped_bars(
    axis: Any,
    explanation: Explanation,
    buckets: Sequence[Bucket],
    height: Callable[[ModeWeights, Bucket], float],
    *,
    with_numbers: bool = False,
) -> None:
    from matplotlib.ticker import FuncFormatter

    families = explanation.families
    width = 0.8 / len(families)
    for place, family in enumerate(families):
        left = [group - 0.4 + (place + 0.5) * width for group in range(len(buckets))]
        bars = axis.bar(
            left,
            [height(family[0], bucket) for bucket in buckets],
            width * 0.92,
            color=COLORS[place % len(COLORS)],
            hatch=HATCHES[place % len(HATCHES)],
            edgecolor="white",
            lw=0,
        )
        if with_numbers and len(families) * len(buckets) <= _MAX_NUMBERED_BARS:
            _number(axis, explanation, bars, buckets)
    labels = [bucket.label.replace(" to ", "\nto ") for bucket in buckets]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    is_crowded = longest * len(labels) > _MAX_LABEL_CHARACTERS
    slanted = {"rotation": 30, "ha": "right"} if is_crowded else {}
    axis.set_xticks(range(len(buckets)), labels, **slanted)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))


def _percent(value: float) -> str:
    return f"{100 * value:g}%".replace("-", "\N{MINUS SIGN}")


def _number(
    axis: Any, explanation: Explanation, bars: Sequence[Any], buckets: Sequence[Bucket]
) -> None:
    """Write each bar's height above it, and above the mark of the share of responses."""
    axis.margins(y=0.12)
    for bar, bucket in zip(bars, buckets, strict=True):
        top = max(bar.get_height(), explanation.share_of_responses(bucket))
        axis.annotate(
            f"{bar.get_height():.0%}",
            (bar.get_x() + bar.get_width() / 2, top),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )


def _mark_share_of_responses(
    axis: Any, explanation: Explanation, buckets: Sequence[Bucket]
) -> None:
    for group, bucket in enumerate(buckets):
        share = explanation.share_of_responses(bucket)
        axis.hlines(share, group - 0.44, group + 0.44, color="black", lw=2)
