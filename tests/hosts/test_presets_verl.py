"""verl-2026-01 and verl-2026-08 beside the installed verl's own agg_loss: 1e-7.

Skipped where that release of verl is not installed. verl adds 1e-8 to a sequence's count.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from host_losses import skip_without
from preset_batch import NUM_RANKS, PresetBatch

from megatron_lossagg import LossAggConfig
from megatron_lossagg.config.presets import PRESETS

pytestmark = pytest.mark.conformance  # importing it takes long

RELEASES = {"verl-2026-01": "0.7.0", "verl-2026-08": "0.9.1"}
INSTALL = {"verl-2026-01": "verl==0.7.0 'transformers<5'", "verl-2026-08": "verl==0.9.1"}
L = 7


@pytest.fixture
def core_algos(name):
    """verl/trainer/ppo/core_algos.py of the preset's release."""
    install = INSTALL[name]
    skip_without("verl", install)
    version = importlib.import_module("verl").__version__
    if version != RELEASES[name]:
        pytest.skip(f"verl {version} is installed: pip install {install}")
    return importlib.import_module("verl.trainer.ppo.core_algos")


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in RELEASES for mode in PRESETS[name].modes]
)
def test_agg_loss(core_algos, name, mode):
    """With the counts that verl's engine passes: tokens, and rows whether valid or not."""
    batch = PresetBatch.make()
    theirs = batch.host_value(
        lambda losses, mask: core_algos.agg_loss(
            losses,
            mask,
            mode,
            dp_size=NUM_RANKS,
            batch_num_tokens=batch.num_tokens,
            global_batch_size=batch.num_rows,
            loss_scale_factor=L,
        )
    )
    is_norm = mode == "seq-mean-token-sum-norm"
    factor = L * NUM_RANKS if is_norm and name == "verl-2026-01" else L  # see `caller_adds`
    options = {"loss_scale_factor": factor} if is_norm else {}
    ours = batch.preset_value(LossAggConfig.preset(name, loss_agg_mode=mode, **options))
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-7, atol=0)
