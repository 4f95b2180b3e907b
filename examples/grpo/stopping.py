"""A clean stop: Ctrl-C lets the step end, all ranks agree to stop, and the run is saved."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_FILE = "STOP"


def stop_file(out: Path) -> Path:
    """The file whose existence asks the run in folder `out` to stop."""
    return out / _FILE


class StopRequest:
    """Whether somebody asked this run to stop: by the stop file, or by a signal to a rank.

    Args:
        out: the run's folder.
        device: where a number can be reduced.
    """

    def __init__(self, out: Path, device: torch.device) -> None:
        self._file = stop_file(out)
        self._device = device
        self._got_signal = False

    def listen_to_signals(self) -> None:
        """Take SIGINT and SIGTERM to this process as requests.

        However many there are: a launcher may pass on what the terminal has sent to all. One that
        loses patience sends SIGKILL.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def is_made(self) -> bool:
        """Whether to stop now, the same answer on every rank. Communicates over all ranks."""
        asked = self._got_signal or (dist.get_rank() == 0 and self._file.exists())
        flag = torch.tensor(int(asked), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def clear(self) -> None:
        """Remove the stop file, on the first rank."""
        if dist.get_rank() == 0:
            self._file.unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._got_signal = True
