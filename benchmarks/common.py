"""What the benchmarks share: alternating rounds, ratios with intervals, and the page they write.

Candidates of one comparison run in one process, one after another in every round, each round in
another order, so that they share whatever else the machine does. A ratio is the median of the
rounds' ratios; its interval is a bootstrap of that median.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

PAGE = Path(__file__).with_name("README.md")
_NUM_RESAMPLES = 1000
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    prepare: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every candidate in every round; `prepare` runs before each, outside the clock."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    for index in range(warmup + rounds):
        shuffle(order)
        for name in order:
            if prepare is not None:
                prepare()
            start = _now()
            candidates[name]()
            elapsed = _now() - start
            if index >= warmup:
                seconds[name].append(elapsed)
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of numerator / denominator."""
    return statistics.median(_quotients(numerator, denominator))


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of `ratio`."""
    quotients = _quotients(numerator, denominator)
    draw = random.Random(0).choices
    medians = sorted(
        statistics.median(draw(quotients, k=len(quotients))) for _ in range(_NUM_RESAMPLES)
    )
    return medians[_NUM_RESAMPLES // 40], medians[-_NUM_RESAMPLES // 40]


def ratio_text(numerator: Sequence[float], denominator: Sequence[float]) -> str:
    """`ratio` with its interval, such as "1.02 (1.01 to 1.03)"."""
    low, high = ratio_interval(numerator, denominator)
    return f"{ratio(numerator, denominator):.2f} ({low:.2f} to {high:.2f})"


def milliseconds(seconds: Sequence[float]) -> str:
    """The median, in ms."""
    return f"{1e3 * statistics.median(seconds):,.3g}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def machine(*packages: str) -> str:
    """Processor, threads and versions in a line."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *packages)]
    return f"{device}, Python {platform.python_version()}, {', '.join(versions)}"


def publish(name: str, title: str, text: str, *, write: bool) -> None:
    """Print a result, and with `write` put it into its section of `benchmarks/README.md`."""
    section = f"<!-- {name}: written by benchmarks/{name}.py -->\n## {title}\n\n{text.strip()}\n"
    print(f"\n{title}\n\n{text}", flush=True)
    if not write:
        return
    page = PAGE.read_text() if PAGE.exists() else "# Benchmarks\n"
    pattern = re.compile(rf"<!-- {re.escape(name)}: .*?(?=<!-- \w+: written by|\Z)", re.DOTALL)
    found = pattern.search(page)
    if found:
        page = page[: found.start()] + section + "\n" + page[found.end() :]
    else:
        page = f"{page.rstrip()}\n\n{section}"
    PAGE.write_text(page.rstrip() + "\n")
    print(f"written to {PAGE.name}", file=sys.stderr)


def keep_freed_memory() -> None:
    """On the CPU, have freed memory used again without asking the system, as on a GPU.

    Else each large tensor is new pages, which the system sets to zero in the clock.
    """
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _quotients(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
