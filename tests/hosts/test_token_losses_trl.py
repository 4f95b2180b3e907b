"""Token losses beside TRL's `_compute_loss`, of GRPOTrainer and GMPOTrainer: 1e-6.

Skipped where TRL is not installed.
"""

from __future__ import annotations

import pytest
from host_losses import assert_same, data, skip_without
from trl_stand_in import load_trl_loss

from megatron_lossagg import agg_loss, token_losses

pytestmark = pytest.mark.conformance  # importing it takes long


@pytest.fixture(scope="module")
def trl_loss():
    """GRPOTrainer._compute_loss, and GMPOTrainer's, of given log-probs."""
    skip_without("trl", "trl==1.16.0")
    return load_trl_loss()


TRL_LOSSES = {
    "grpo": lambda *a: token_losses.ppo_clip(*a, clip_low=0.2, clip_high=0.28),
    "grpo-delta": lambda *a: token_losses.ppo_clip(*a, clip_low=0.2, clip_high=0.28, dual_clip=1.6),
    "cispo": lambda *a: token_losses.cispo(*a, clip_high=0.28),
    "sapo": lambda *a: token_losses.sapo(*a, tau_pos=1.2, tau_neg=1.7),
    "grpo-sequence": lambda *a: token_losses.gspo(*a, clip_low=0.1, clip_high=0.15),
    "gmpo": lambda *a: token_losses.gmpo(*a, clip_low=0.3, clip_high=0.4),
}


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_trl_losses(trl_loss, name):
    """Advantages per sequence, as TRL has them. CISPO's bound there is that of the ratio."""
    x, old, advantages, mask = data(sequence_advantages=True)
    options = {"loss_type": name.split("-")[0]}
    if name == "grpo-delta":
        options["delta"] = 1.6
    elif name == "grpo-sequence":
        options |= {"level": "sequence", "low": 0.1, "high": 0.15}
    elif name == "cispo":
        options["high"] = 1.28
    elif name == "gmpo":
        options |= {"low": 0.3, "high": 0.4}
    mode = "token-mean" if name == "cispo" else "seq-mean-token-mean"
    assert_same(
        lambda x: agg_loss(TRL_LOSSES[name](x, old, advantages, mask), mask, mode),
        lambda x: trl_loss(x, old, advantages, mask, **options),
        x,
    )


def test_trl_kl_term(trl_loss):
    x, ref, _, mask = data()
    assert_same(
        lambda x: (
            0.3 * agg_loss(token_losses.kl_penalty(x, ref, mask), mask, "seq-mean-token-mean")
        ),
        lambda x: trl_loss(x, x.detach(), 0 * x, mask, ref=ref, beta=0.3, loss_type="grpo"),
        x,
    )
