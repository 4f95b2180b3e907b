"""`ppo_clip` beside torchtitan's DAPOLoss. Skipped where torchtitan is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from host_losses import skip_without, value_and_gradient

from megatron_lossagg import token_losses

pytestmark = pytest.mark.conformance  # importing it takes long


@pytest.fixture(scope="module")
def dapo_loss():
    """DAPOLoss, from its file: the package around it imports vLLM."""
    skip_without("torchtitan", "torchtitan==0.3.0")
    [root] = importlib.util.find_spec("torchtitan").submodule_search_locations
    path = Path(root) / "experiments" / "rl" / "losses" / "dapo.py"
    spec = importlib.util.spec_from_file_location("torchtitan_dapo", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.DAPOLoss


def test_torchtitan_dapo_loss(dapo_loss):
    """From logits, in float32 as torchtitan computes: 1e-5; NaN at a masked position is dropped."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, 11, generator=generator)
    labels = torch.randint(11, (3, 8), generator=generator)
    own = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    old = own + 0.4 * torch.randn(3, 8, generator=generator)
    advantages = torch.randn(3, 8, generator=generator)
    mask = torch.rand(3, 8, generator=generator) < 0.7
    old = old.masked_fill(~mask, torch.nan)
    theirs = dapo_loss(dapo_loss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28))

    def ours(logits):
        log_probs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        losses = token_losses.ppo_clip(
            log_probs, old, advantages, mask, clip_low=0.2, clip_high=0.28
        )
        return losses.sum() / mask.sum()

    torch.testing.assert_close(
        value_and_gradient(ours, logits),
        value_and_gradient(
            lambda logits: theirs(
                logits,
                labels,
                float(mask.sum()),
                generator_logprobs=old,
                advantages=advantages,
                loss_mask=mask,
            )[0],
            logits,
        ),
        rtol=1e-5,
        atol=1e-7,
    )
