"""Stand-ins for what raises in `torch.cuda` where there is no driver.

Streams are synchronous and events remember CPU times, so that code that waits and measures works.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import torch

_CPU = torch.device("cpu")


def cuda_stand_ins() -> dict[str, Any]:
    """Name of a `torch.cuda` attribute -> what takes its place."""
    the_stream = _Stream()
    properties = SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1, warp_size=32
    )
    return {
        "Stream": _Stream,
        "Event": _Event,
        "device": _device,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "current_stream": lambda device=None: the_stream,
        "default_stream": lambda device=None: the_stream,
        "set_stream": lambda stream: None,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda new_state, device="cuda": None,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: "cpu",
        "mem_get_info": lambda device=None: (0, 0),
        "reset_peak_memory_stats": lambda device=None: None,
        "ipc_collect": lambda: None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
    }


class _Stream:
    """A stream on which everything has already happened: the CPU runs in program order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device, self.priority = _CPU, priority
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        """Record the time now."""
        event = event or _Event()
        event.record(self)
        return event


class _Event:
    """An event that remembers when it was recorded, so that timers show CPU time."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the time now."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds between two recorded events."""
        return (end_event._seconds - self._seconds) * 1e3


class _device(contextlib.nullcontext):  # noqa: N801 - named as the class it stands in for
    """`with torch.cuda.device(i):` without a device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        self.idx = 0
