"""What is kept of each step: a line of JSON, and a point in TensorBoard if it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Metrics = dict[str, float]

# These depend on the machine; everything else is the same whenever a run is repeated.
TIMINGS = ("seconds", "tokens_per_second")


def read_metrics(path: Path) -> list[Metrics]:
    """The steps in a file that `MetricsWriter` wrote; a last line that is cut off is left out."""
    if not path.exists():
        return []
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return steps


class MetricsWriter:
    """Appends steps to `metrics.jsonl` and to `tensorboard/` in a run's folder.

    Args:
        out: the folder.
        resume_after: keep the steps of the file up to this one, drop what came after it.
    """

    def __init__(self, out: Path, *, resume_after: int) -> None:
        path = out / "metrics.jsonl"
        self.history = [m for m in read_metrics(path) if m["step"] <= resume_after]
        out.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for metrics in self.history:
            self._write_line(metrics)
        self._tensorboard = _summary_writer(out / "tensorboard", resume_after)

    def write(self, metrics: Metrics) -> None:
        """Add a step."""
        self.history.append(metrics)
        self._write_line(metrics)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if name != "step":
                    self._tensorboard.add_scalar(name, value, int(metrics["step"]))

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_line(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()


def _summary_writer(folder: Path, resume_after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resume_after + 1)
