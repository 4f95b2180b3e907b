"""How much memory a piece of code allocates at its peak, read from torch's own allocators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class PeakMemory:
    """What `peak_memory` found.

    Attributes:
        num_bytes: the peak of what was allocated within the block and not yet freed.
    """

    num_bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the peak of the memory that tensors take within the block. Does not communicate.

    Every allocation of torch's allocator counts, those inside of an operator included: on a GPU, if
    there is one in use, by `torch.cuda.max_memory_allocated`, else those on the CPU by torch's
    profiler. Does not depend on time.

    Yields:
        A `PeakMemory` that is filled when the block ends.
    """
    peak = PeakMemory()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.num_bytes = torch.cuda.max_memory_allocated() - before
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells stderr that it runs
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield peak
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    allocated = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak.num_bytes = max(peak.num_bytes, allocated)
