"""Presets beside TRL's `_compute_loss` on 2 devices with 2 accumulation steps: 1e-6.

Skipped where TRL is not installed.
"""

from __future__ import annotations

import pytest
import torch
from host_losses import skip_without
from preset_batch import NUM_MICROBATCHES, NUM_RANKS, PresetBatch
from trl_stand_in import load_trl_loss

from megatron_lossagg import LossAggConfig, token_losses

pytestmark = pytest.mark.conformance  # importing it takes long

L = 7
PRESETS = {  # preset -> TRL's loss_type
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "trl-dr_grpo": "dr_grpo",
    "dapo": "dapo",
    "cispo": "cispo",
    "gspo": "grpo",
}


@pytest.fixture(scope="module")
def trl_loss():
    skip_without("trl", "trl==1.16.0")
    return load_trl_loss()


@pytest.mark.parametrize("name", PRESETS)
def test_presets(trl_loss, name):
    """Global J, and the mean over devices of what each accumulates."""
    log_probs = -PresetBatch.make().losses.abs()
    old = log_probs + 0.3 * PresetBatch.make().losses.roll(1, -1)
    batch = PresetBatch.make()
    advantages = batch.losses[..., :1].expand(batch.masks.shape)
    fields = torch.stack([log_probs, old, advantages])

    def token_loss(x, old, advantages, mask):
        if name == "cispo":
            return token_losses.cispo(x, old, advantages, mask, clip_high=0.28)
        policy_loss = token_losses.gspo if name == "gspo" else token_losses.ppo_clip
        return policy_loss(x, old, advantages, mask, clip_low=0.2, clip_high=0.28)

    def flat(tensor):
        return tensor.flatten(0, -2)

    losses = token_loss(*(flat(f) for f in fields), flat(batch.masks)).view(batch.masks.shape)
    ours = PresetBatch(losses, batch.masks)
    # What stands for the losses here are the fields that TRL computes them from.
    theirs = PresetBatch(fields.permute(1, 2, 3, 4, 0), batch.masks).host_value(
        lambda fields, mask: trl_loss(
            *fields.unbind(-1),
            mask,
            loss_type=PRESETS[name],
            level="sequence" if name == "gspo" else "token",
            high=1.28 if name == "cispo" else 0.28,
            num_items=torch.tensor(batch.num_tokens),
            num_processes=NUM_RANKS,
            accumulation=NUM_MICROBATCHES,
            max_length=L,
        )
    )
    options = {"loss_scale_factor": L} if "dr_grpo" in name else {}
    value = ours.preset_value(LossAggConfig.preset(name, **options))
    torch.testing.assert_close(value, theirs.double(), rtol=1e-6, atol=0)
