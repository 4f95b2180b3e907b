"""Helpers for tests of the plugin in one process.

`run_schedule` imitates only what a schedule does to iterators and returned losses, so that misuse
can be provoked. It proves nothing about Megatron; tests/megatron runs the real schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lossagg import LossAggregator, ParallelGroups

# Width 4, four sequences, the last without a valid token: T = 7, 3 valid sequences of 4 rows.
FIXTURE_F_LOSSES = [[1, 2, 3, 4], [6, 9, 9, 9], [2, 2, 9, 9], [8, 9, 9, 9]]
FIXTURE_F_MASK = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
# (mode, options, value with B = valid sequences, value with B = nominal rows)
FIXTURE_F_VALUES = [
    ("token-mean", {}, 20 / 7, 20 / 7),
    ("token-sum", {}, 20.0, 20.0),
    ("seq-mean-token-sum", {}, 20 / 3, 5.0),
    ("seq-mean-token-mean", {}, 3.5, 2.625),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 4}, 5.0, 5.0),
    (
        "seq-mean-token-sum-norm",
        {"loss_scale_factor": 4, "norm_semantics": "seq-mean"},
        5 / 3,
        1.25,
    ),
]
MODES = [(mode, options) for mode, options, *_ in FIXTURE_F_VALUES]

REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
ALL_MODES = pytest.mark.parametrize(("mode", "options"), MODES)


@dataclass(frozen=True)
class FakeGroup:
    """Answers size() and rank() like a process group that cannot communicate."""

    num_ranks: int
    own_rank: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.own_rank


def model_config(per_token: bool = False, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(calculate_per_token_loss=per_token, **options)


def make_aggregator(
    loss_agg_mode: str = "token-mean",
    *,
    per_token: bool = False,
    loss_fn: Any = lambda output_tensor, microbatch: output_tensor,
    **options: Any,
) -> LossAggregator:
    options.setdefault("model_config", model_config(per_token))
    options.setdefault("groups", ParallelGroups.single_process())
    options.setdefault("weight_dtype", torch.float64)
    return LossAggregator(loss_fn, loss_agg_mode=loss_agg_mode, **options)


def make_microbatch(losses: Any, mask: Any, **fields: Any) -> dict[str, Any]:
    """A microbatch whose "losses" are a leaf that collects a gradient."""
    losses = torch.tensor(losses, dtype=torch.float64, requires_grad=True)
    return {"losses": losses, "loss_mask": torch.tensor(mask), **fields}


def ones(num_microbatches: int, loss: float = 1.0) -> list[dict[str, Any]]:
    """Microbatches of one row with two valid tokens, all of the same loss."""
    return [make_microbatch([[loss, loss]], [[1, 1]]) for _ in range(num_microbatches)]


def fixture_f(num_microbatches: int) -> list[dict[str, Any]]:
    rows = 4 // num_microbatches
    return [
        make_microbatch(FIXTURE_F_LOSSES[i : i + rows], FIXTURE_F_MASK[i : i + rows])
        for i in range(0, 4, rows)
    ]


def run_schedule(
    loss_func: Any,
    iterator: Any,
    num_microbatches: int,
    *,
    divide_by: float | None = None,
    backward: bool = True,
) -> list[dict[str, torch.Tensor]]:
    """Take microbatches, rescale two-value losses in place, run backward, keep the reports."""
    store = []
    for _ in range(num_microbatches):
        microbatch = next(iterator)
        loss, *num_tokens, report = loss_func(microbatch, microbatch["losses"])
        if not num_tokens:
            loss /= num_microbatches if divide_by is None else divide_by
        if backward:
            loss.backward()
        store.append(report)
    return store


def run_step(step: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    return run_schedule(step.loss_func, step.data_iterator(1)[0], step.num_microbatches, **options)
