"""Importing the library needs torch and the standard library, nothing else."""

from __future__ import annotations

import subprocess
import sys

import megatron_lossagg

OPTIONAL = ("megatron", "numpy", "yaml", "typer", "rich", "hypothesis", "matplotlib")

SCRIPT = f"""
import sys, warnings
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it raises
warnings.simplefilter("ignore")
import torch
before = set(sys.modules)
import megatron_lossagg
assert "megatron_lossagg.token_losses" not in sys.modules
from megatron_lossagg import token_losses
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
others = new - set(sys.stdlib_module_names) - {{"megatron_lossagg", "torch"}}
assert not others, others
assert not torch.distributed.is_initialized()

from types import SimpleNamespace
from megatron_lossagg import LossAggregator, ParallelGroups
aggregator = LossAggregator(
    lambda output_tensor, microbatch: output_tensor,
    loss_agg_mode="token-mean",
    model_config=SimpleNamespace(calculate_per_token_loss=False),
    groups=ParallelGroups.single_process(),
)
step = aggregator.begin_step([{{"loss_mask": torch.tensor([[1, 0]])}}])
microbatch = next(step.data_iterator(1)[0])
loss, report = step.loss_func(microbatch, torch.tensor([[4.0, 9.0]]))
step.validate()
assert step.report([report]) == {{"loss": 4.0}} and loss.item() == 4.0
print("done")
"""


def test_import_and_a_step_need_torch_alone():
    """No Megatron, numpy or CLI package, no process group: import and one step in one process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_public_names():
    """Every promised name is there, and nothing in __all__ is missing."""
    promised = {
        "agg_loss",
        "count_global_batch",
        "GlobalCounts",
        "token_weights",
        "LossAggregator",
        "ParallelGroups",
        "ScheduleContract",
        "LossAggConfig",
        "slice_for_cp",
        "LossAggError",
    }
    assert promised <= set(megatron_lossagg.__all__)
    assert all(hasattr(megatron_lossagg, name) for name in megatron_lossagg.__all__)
    assert issubclass(megatron_lossagg.LossAggError, RuntimeError)
