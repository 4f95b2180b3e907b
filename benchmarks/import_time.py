"""What `import megatron_lossagg` adds to `import torch`: fresh interpreters, alternating.

python benchmarks/import_time.py --write
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from common import alternate, machine, markdown_table, publish

CODE = {
    "torch": "import torch",
    "torch and megatron_lossagg": "import torch, megatron_lossagg",
    "torch and megatron_lossagg.token_losses": "import torch, megatron_lossagg.token_losses",
}
TARGET_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="replace the section in README.md")
    arguments = parser.parse_args()

    def interpreter(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    candidates = {name: (lambda code=code: interpreter(code)) for name, code in CODE.items()}
    seconds = alternate(candidates, rounds=arguments.rounds, warmup=1)
    rows = []
    for name, values in seconds.items():
        added = [a - b for a, b in zip(values, seconds["torch"], strict=True)]
        rows.append(
            [
                f"import {name}",
                f"{statistics.median(values):.2f} s",
                "" if name == "torch" else f"{statistics.median(added):.3f} s",
                "" if name == "torch" else f"at most {TARGET_S} s",
            ]
        )
    table = markdown_table(["", "whole interpreter", "added to torch", "target"], rows)
    publish(
        "import_time",
        "Import",
        f"{arguments.rounds} rounds of fresh interpreters, in another order in each; what is added "
        f"is the median of the differences within a round. {machine()}.\n\n{table}",
        write=arguments.write,
    )


if __name__ == "__main__":
    main()
