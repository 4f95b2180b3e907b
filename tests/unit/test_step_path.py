"""tools/step_path.py, which counts what a reader of one step has to follow, keeps working."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "step_path.py"


def test_it_prints_four_numbers_a_line():
    """Each path has as many calls as are listed; functions, files and changes are fewer."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--list"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    paths, listed = {}, {}
    for line in done.stdout.splitlines()[1:]:
        if line[0] != " ":
            name = line[:20].strip()
            paths[name], listed[name] = [int(word) for word in line[20:].split()], {}
        else:
            num_calls, file = line.split()
            listed[name][file] = int(num_calls)
    assert list(paths) == ["a step", "first next of wrap"]
    for name, (calls, functions, files, changes) in paths.items():
        assert calls >= functions >= files == len(listed[name])
        assert calls > changes >= files - 1 > 0
        assert sum(listed[name].values()) == calls
        assert "aggregator.py" in listed[name]
