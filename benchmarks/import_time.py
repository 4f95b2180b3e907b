"""What `import megatron_lossagg` adds to `import torch`: fresh interpreters, alternating.

python benchmarks/import_time.py --write
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from common import alternate, machine, markdown_table, publish

MODULES = ("megatron_lossagg", "megatron_lossagg.token_losses")
CODE = (
    "import time, torch; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
)
TARGET_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="replace the section in README.md")
    arguments = parser.parse_args()
    inside: dict[str, list[float]] = {}

    def interpreter(module: str | None) -> None:
        code = "import torch" if module is None else CODE.format(module)
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        if module is not None:
            inside.setdefault(module, []).append(float(out.stdout))

    candidates: dict[str, Callable[[], None]] = {"torch": partial(interpreter, None)}
    candidates |= {module: partial(interpreter, module) for module in MODULES}
    seconds = alternate(candidates, rounds=arguments.rounds, warmup=1)
    rows = [["torch alone", f"{statistics.median(seconds['torch']):.2f} s", "", ""]]
    for module in MODULES:
        rows.append(
            [
                f"and {module}",
                f"{statistics.median(seconds[module]):.2f} s",
                f"{statistics.median(inside[module]):.3f} s",
                f"at most {TARGET_S} s",
            ]
        )
    header = ["import", "whole interpreter", "its import, after torch", "target"]
    table = markdown_table(header, rows)
    publish(
        "import_time",
        "Import",
        f"{arguments.rounds} rounds of fresh interpreters, in another order in each, medians; the "
        "import after that of torch is on the interpreter's own clock, since whole interpreters "
        f"differ by more from round to round. {machine()}.\n\n{table}",
        write=arguments.write,
    )


if __name__ == "__main__":
    main()
