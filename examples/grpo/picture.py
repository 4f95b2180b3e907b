"""The picture of a run: curves over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.metrics import Metrics

# Okabe and Ito's palette, which people with colour-blindness can tell apart.
COLORS = ("#0072B2", "#D55E00")
GREY = "#5A5A5A"


@dataclass(frozen=True)
class Line:
    """A horizontal line to compare a curve with."""

    value: float
    label: str


@dataclass(frozen=True)
class Panel:
    """One curve.

    Attributes:
        metric: its name in the metrics.
        title: what it shows.
        y_label: the quantity and its unit.
        lines: what to compare it with.
        limits: of the vertical axis; None fits the data.
        legend_location: where the curve leaves room, in matplotlib's words.
    """

    metric: str
    title: str
    y_label: str
    lines: tuple[Line, ...] = ()
    limits: tuple[float, float] | None = None
    legend_location: str = "best"


def draw(path: Path, title: str, panels: Sequence[Panel], history: Sequence[Metrics]) -> None:
    """Draw the panels side by side: each step as a dot, and their running mean as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [m["step"] for m in history]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.0), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=12)
    for axis, panel, color in zip(axes[0], panels, COLORS, strict=False):
        values = [m[panel.metric] for m in history]
        axis.plot(steps, values, "o", ms=3, color=color, alpha=0.5, mew=0, label="each step")
        axis.plot(steps, _smooth(values), color=color, lw=2.2, label="running mean")
        for line in panel.lines:
            axis.axhline(line.value, color=GREY, lw=1.3, ls="--", label=line.label)
        axis.set_title(panel.title, fontsize=11)
        axis.set_xlabel("training step")
        axis.set_ylabel(panel.y_label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if panel.limits is not None:
            axis.set_ylim(*panel.limits)
        axis.grid(color="#E0E0E0", lw=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc=panel.legend_location, fontsize=9, framealpha=0.9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _smooth(values: Sequence[float], half_width: int = 4) -> list[float]:
    """Mean over the steps up to `half_width` away from each."""
    windows = [values[max(0, i - half_width) : i + half_width + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
