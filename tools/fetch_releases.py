"""Fetch the Megatron-Core releases of the matrix into .releases/ (1 GB, most of it triton)."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_lossagg.testing.ranks.releases import RELEASES, FetchError, fetch


def main() -> str | None:
    """The exit message: nothing if all releases are there."""
    folder = Path(__file__).resolve().parents[1] / ".releases"
    for release in RELEASES:
        if not (folder / release.version).is_dir():
            print(f"[releases] fetching megatron-core {release.version}", flush=True)
        try:
            fetch(release.version, folder)
        except FetchError as error:
            return f"[releases] {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
