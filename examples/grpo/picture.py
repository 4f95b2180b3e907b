"""The picture of a run: curves over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.metrics import Metrics

# Okabe and Ito's palette, which people with colour-blindness can tell apart.
COLORS = ("#0072B2", "#D55E00")
GREY = "#5A5A5A"
BAND_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
BAND_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), "-.")


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


@dataclass(frozen=True)
class BandPanel:
    """One metric of several groups of runs.

    Attributes:
        metric, title, y_label, limits: as in `Panel`.
        line: a value to compare with, and what it is.
        is_logarithmic: of the vertical axis.
    """

    metric: str
    title: str
    y_label: str
    limits: tuple[float, float] | None = None
    line: tuple[float, str] | None = None
    is_logarithmic: bool = False


@dataclass(frozen=True)
class Band:
    """Runs that differ in their seed alone."""

    label: str
    runs: Sequence[Sequence[Metrics]]


def draw_bands(path: Path, title: str, panels: Sequence[BandPanel], bands: Sequence[Band]) -> None:
    """Draw the panels, two in a row: per group the mean of its runs, and from least to largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(11, 3.9 * rows + 0.5), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=12)
    for axis, panel in zip(axes.flat, panels, strict=True):
        for band, color, style in zip(bands, BAND_COLORS, BAND_STYLES, strict=False):
            steps = [m["step"] for m in band.runs[0]]
            curves = [_smooth([m[panel.metric] for m in run]) for run in band.runs]
            columns = list(zip(*curves, strict=True))
            means = [sum(column) / len(column) for column in columns]
            axis.fill_between(
                steps,
                list(map(min, columns)),
                list(map(max, columns)),
                color=color,
                alpha=0.15,
                lw=0,
            )
            axis.plot(steps, means, color=color, ls=style, lw=2.0, label=band.label)
        if panel.line is not None:
            value, label = panel.line
            axis.axhline(value, color=GREY, lw=1.2, ls=":")
            axis.annotate(
                label,
                (1.0, value),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=GREY,
            )
        axis.set_title(panel.title, fontsize=11)
        axis.set_xlabel("training step")
        axis.set_ylabel(panel.y_label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if panel.is_logarithmic:
            axis.set_yscale("log")
        if panel.limits is not None:
            axis.set_ylim(*panel.limits)
        axis.grid(color="#E0E0E0", lw=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
