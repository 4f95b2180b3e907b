"""The benchmarks on one device, in under five minutes: the same tables as on the page.

    python benchmarks/gpu.py                  # on a GPU
    python benchmarks/gpu.py --cpu            # the same, short, on this machine's processor

Each benchmark is a process of its own with a time limit, so one that fails costs the others
nothing. What needs several ranks (a schedule step, scale) runs on CPU ranks of the same machine,
which their tables name, as NCCL wants a device for each rank.

This script has not run on a GPU yet, and no number on the page is from one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

LIMIT_S = 290
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "aggregation": ("--quick",),
    "policy_loss": ("--rounds", "21"),
    "logits": ("--quick",),
    "begin_step": ("--rounds", "20", "--no-ranks"),
    "import_time": ("--rounds", "5"),
    "scale": ("--rounds", "5"),
    "schedule_share": ("--sets", "2", "--pairs", "10"),
}
ON_CPU_RANKS = ("scale", "schedule_share")
NEED_VERL = ("aggregation", "policy_loss")


def main() -> int:
    """Run them in turn; returns how many did not end well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="without a GPU, on the processor")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.cpu:
        print("error: torch sees no GPU here. Pass --cpu to run on the processor.", file=sys.stderr)
        return 2
    started, failed = time.monotonic(), []
    for name, options in BENCHMARKS.items():
        if name in NEED_VERL and importlib.util.find_spec("verl") is None:
            print(f"\n{name}: left out, since verl is not installed (requirements.txt)")
            continue
        left = LIMIT_S - (time.monotonic() - started)
        script = Path(__file__).with_name(f"{name}.py")
        try:
            subprocess.run(
                [sys.executable, script, *options],
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if name in ON_CPU_RANKS else {}),
                timeout=max(1, left),
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"\n{name}: {error}", file=sys.stderr)
            failed.append(name)
    print(f"\n{time.monotonic() - started:.0f} s in all; failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
