"""What `doctor` says of mistakes is what happens: each is made on the real schedule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from prescribed import run
from test_public_reports import fixture_f
from typer.testing import CliRunner

from megatron_lossagg.cli.app import app
from megatron_lossagg.cli.doctor.case import DoctorCase
from megatron_lossagg.cli.doctor.diagnosis import diagnose
from megatron_lossagg.modes import ModeSpec
from megatron_lossagg.testing.run import StepPlan
from megatron_lossagg.testing.sum_loss_plan import sliced_for_cp

TEXT = "C=2 D=2 M=2"
M, D, C, J = 2, 2, 2, 20 / 7  # token-mean of the fixture
# By hand, for partial sums S of w * l that add up to J.
BY_HAND = {
    "return S as it is": (False, 1),
    "forget M": (False, D),
    "forget D": (False, M),
    "leave the schedule's C in": (False, M * D * C),
    "have calculate_per_token_loss turned on by someone": (True, M * D),
}


@dataclass(frozen=True)
class ByHand:
    """S times a number, with two values."""

    factor: float

    def __call__(self, context):
        def forward_step(data_iterator, model):
            microbatch = sliced_for_cp(next(data_iterator))
            return model(microbatch["loss_mask"]), partial(self.loss_func, microbatch)

        return StepPlan(forward_step, iter(context.microbatches), M)

    def loss_func(self, microbatch, output):
        loss = (output * microbatch["losses"] * microbatch["loss_mask"] / 7).sum()
        return loss * self.factor, {"loss": torch.zeros(2)}


@pytest.mark.parametrize("what", BY_HAND)
def test_a_mistake_has_the_ratio_that_is_printed(rank_pool, what):
    """Gradient over J, for each mistake of R1 that has a number."""
    case = DoctorCase().with_overrides(layout=TEXT, calculate_per_token_loss=False)
    found = diagnose(case.model_flags(), case.groups(), ModeSpec("token-mean"), M)
    ratios = {m.what: m.ratio for m in found.mistakes if m.ratio is not None}
    assert set(ratios) == set(BY_HAND)
    per_token, factor = BY_HAND[what]
    gradients, _ = run(
        rank_pool, fixture_f(TEXT), TEXT, "token-mean", per_token=per_token, plan=ByHand(factor)
    )
    for gradient in gradients.values():
        assert gradient / J == pytest.approx(float(ratios[what]), rel=1e-12)


@pytest.mark.conformance
def test_measured():
    """--measure drives the layout's schedule; the gradient is what it should be."""
    result = CliRunner().invoke(
        app,
        ["doctor", "--layout", "PP=2 C=2 M=4", "--calculate-per-token-loss", "--measure", "--json"],
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["measured"] == pytest.approx(1, rel=1e-6)
