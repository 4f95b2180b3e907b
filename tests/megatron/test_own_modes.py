"""Property: a registered mode is exact in every regime and layout, and its weights are checked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pairs import all_pairs

from megatron_lossagg import register_mode
from megatron_lossagg.modes import get_mode
from megatron_lossagg.modes.registry import _MODES
from megatron_lossagg.testing import Layout, RankFailure, TinyGPT, relative_error
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.cases import (
    ALL_REGIMES,
    GRADIENT_BOUNDS,
    Case,
    standard_batch,
)

LONG = pytest.mark.conformance
CASES = [
    ("PP=2 D=2 M=4", "R1", "begin_step"),
    ("C=2 D=2 M=2", "R3", "wrap"),
    *(
        pytest.param(*case, marks=LONG)
        for case in all_pairs(("D=4 M=4", "TP=2 PP=2 M=4"), ALL_REGIMES, ("begin_step", "wrap"))
    ),
]


@pytest.fixture(autouse=True)
def forget_own_modes():
    """Other tests list the modes there are."""
    before = dict(_MODES)
    yield
    _MODES.clear()
    _MODES.update({k: v for k, v in before.items() if k != "sqrt-length"})


def run(rank_pool, text, regime, planning, **options):
    # Imported late: it registers its mode, which tests of other files would see.
    from own_modes import reference_on_rank, steps_on_rank

    layout, gpt = Layout.parse(text), TinyGPT()
    batch = standard_batch(layout)
    plan = replace(
        AggregatorPlan("token-mean", planning=planning, returns=ALL_REGIMES[regime][1], **options),
        loss_agg_mode="sqrt-length",
    )
    [(loss, gradient)] = rank_pool.run(reference_on_rank, gpt, batch, world_size=1)
    results = rank_pool.run(
        steps_on_rank, gpt, batch, Case(layout, regime), [plan], world_size=layout.world_size
    )
    return loss, gradient, [result[0] for result in results]


@pytest.mark.parametrize(("text", "regime", "planning"), CASES)
def test_gradient_and_loss(rank_pool, text, regime, planning):
    """One line of code: exact as the modes that are built in."""
    loss, gradient, results = run(rank_pool, text, regime, planning)
    assert relative_error(results[0][0], gradient) <= GRADIENT_BOUNDS[regime]
    reported = [report["loss"] for _, report in results if "loss" in report]
    assert reported and all(abs(value - loss) <= 1e-12 * abs(loss) for value in reported)


def test_lost_weights_are_found(rank_pool):
    """Without a formula for its checksum the sum of the plan's weights stands in."""
    with pytest.raises(RankFailure, match="the mode's checksum is"):
        rank_pool.run(_altered, world_size=2)


def _altered():
    import own_modes  # noqa: F401 - registers
    import torch

    from megatron_lossagg import LossAggregator
    from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel

    initialize_model_parallel(Layout(dp=2))
    from types import SimpleNamespace

    aggregator = LossAggregator(
        lambda output, microbatch: output,
        loss_agg_mode="sqrt-length",
        model_config=SimpleNamespace(calculate_per_token_loss=False),
    )
    step = aggregator.begin_step([{"loss_mask": torch.ones(2, 3)}])
    [microbatch] = step.microbatches
    if torch.distributed.get_rank() == 1:
        microbatch["loss_weights"] = microbatch["loss_weights"] * 0.5
    loss, _ = step.loss_func(microbatch, torch.ones(2, 3, requires_grad=True))
    step.validate()


def test_names_are_not_taken_twice():
    """Neither a built-in mode nor one's own is replaced silently."""
    for name in ("token-mean", "own"):
        with pytest.raises(ValueError, match=f"'{name}' exists already"):
            register_mode("own", lambda n_s, c: n_s) if "own" not in _MODES else None
            register_mode(name, lambda n_s, c: n_s)
    for arguments in (("", len), ("x", 3)):
        with pytest.raises(TypeError, match="expects a name and a function"):
            register_mode(*arguments)


def test_modules_named_in_the_environment_are_imported(monkeypatch, tmp_path):
    """What `megatron-lossagg --import MODULE` sets, for this process and its ranks."""
    (tmp_path / "some_modes.py").write_text(
        "from megatron_lossagg import register_mode\n"
        'register_mode("from-a-module", lambda n_s, c: n_s)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="Unknown loss_agg_mode 'from-a-module'"):
        get_mode("from-a-module")
    monkeypatch.setenv("MEGATRON_LOSSAGG_IMPORT", "some_modes")
    assert get_mode("from-a-module").name == "from-a-module"


@pytest.mark.conformance
def test_verify_finds_modes_of_a_module(monkeypatch):
    """`megatron-lossagg --import own_modes verify --modes sqrt-length`: exact; a fault is found."""
    arguments = ["--import", "own_modes", "verify", "--modes", "sqrt-length"]
    arguments += ["--layouts", "C=2 M=2", "--regimes", "R1,R3"]
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    for fault, expected in ((), 0), (("--plant", "drop-num-microbatches"), 1):
        command = [sys.executable, "-m", "megatron_lossagg.cli", *arguments, *fault]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stdout + done.stderr
