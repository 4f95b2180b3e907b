"""The same calls work in a pool, in a plain script and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_BODY = """
from megatron_lossagg.testing import (
    Layout, SumLossPlan, TinyGPT, ragged_batch, relative_error, run_global_batch,
    reference_run, token_log_probs,
)

def losses(logits, rows):
    return -token_log_probs(logits, rows["labels"])

def main(text):
    layout = Layout.parse(text)
    batch = ragged_batch(4, dp=layout.dp, num_microbatches=layout.num_microbatches)
    gpt = TinyGPT(num_layers=2)
    result = run_global_batch(batch, layout, SumLossPlan(1.0), gpt=gpt)
    _, expected = reference_run(gpt, batch, losses, "token-sum")
    if result.gradients is not None:
        print("close:", relative_error(result.gradients, expected) < 1e-12)
    return result.report
"""


def _start(folder: Path, name: str, tail: str, *launcher: str) -> subprocess.Popen:
    script = folder / name
    script.write_text(_BODY + tail)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_scripts(tmp_path):
    """One process, two processes of torchrun, and two under a layout for four, at the same time."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    guard = 'if __name__ == "__main__":\n    main("{}")\n'
    plain = _start(tmp_path, "plain.py", guard.format("D=1 M=2"))
    two = _start(tmp_path, "two.py", guard.format("PP=2 M=2"), *torchrun)
    misfit = _start(tmp_path, "misfit.py", guard.format("PP=4 M=2"), *torchrun)
    outcomes = [process.communicate(timeout=400) for process in (plain, two, misfit)]
    assert plain.returncode == 0, outcomes[0][1]
    assert outcomes[0][0].split() == ["close:", "True"]
    assert two.returncode == 0, outcomes[1][1]
    assert outcomes[1][0].split() == ["close:", "True"]
    assert misfit.returncode != 0
    assert "layout 'PP=4 M=2' needs 4 ranks (D * TP * PP * C), but there are 2" in outcomes[2][1]
