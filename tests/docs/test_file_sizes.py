"""No file is longer than can be read in one sitting."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("folder", "limit"), [("megatron_lossagg", 300), ("plugin", 300), ("tests", 400)]
)
def test_lines(folder, limit):
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert {path: length for path, length in lengths.items() if length > limit} == {}
