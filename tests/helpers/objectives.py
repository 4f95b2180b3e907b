"""Plans of whole aggregators for the scalar model of `prescribed`: any terms, modes and planning.

Functions that ranks run are at the top level of this file; own modes are registered on the ranks,
so that tests which list modes do not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from prescribed import batch_of, even, prescribed_losses, run_on_rank
from test_public_reports import F_LOSSES, F_MASK

from megatron_lossagg import LossAggregator, LossTerm, register_mode, slice_for_cp
from megatron_lossagg.modes import mode_names
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.run import StepPlan

PLANNINGS = ("begin_step", "wrap", "displaced")
LAYOUTS = ("D=2 M=2", "C=2 D=2 M=2", "PP=2 M=4")
# Two tokens, of losses 1 and 6, in the first two rows.
PAIR_MASK = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]

OWN_MODES: dict[str, Callable[..., torch.Tensor]] = {
    "drop-long": lambda n_s, c: (n_s < 4).double() / c.num_seqs,
    "falling": lambda n_s, c: (10 - n_s).clamp(min=0) / c.num_seqs,
    "centred": lambda n_s, c: (n_s - 2) / c.num_seqs,
    "nothing": lambda n_s, c: 0 * n_s,
}


def own_mode(name: str) -> str:
    """The mode's name, registered in this process."""
    if name not in mode_names():
        register_mode(name, OWN_MODES[name])
    return name


@dataclass(frozen=True)
class Planned:
    """A step of the aggregator that `make()` gives the arguments of.

    `planning`: "begin_step", "wrap", or "displaced" for a wrapped iterator whose weights ride in
    `loss_mask`.
    """

    make: Callable[[], dict[str, Any]]
    planning: str = "begin_step"

    def __call__(self, context):
        arguments = {"weight_dtype": torch.float64, **self.make()}
        loss_fn = arguments.pop("loss_fn", None)
        key = "loss_mask" if self.planning == "displaced" else "loss_weights"
        aggregator = LossAggregator(
            loss_fn, model_config=context.model_config, weights_key=key, **arguments
        )
        number = len(context.microbatches)
        if self.planning == "begin_step":
            step = aggregator.begin_step(context.microbatches)
            data = step.data_iterator(len(context.chunks))
        else:
            step = aggregator
            data = aggregator.wrap(
                [iter(context.microbatches) for _ in context.chunks], num_microbatches=number
            )

        def forward_step(data_iterator, model):
            part = slice_for_cp(next(data_iterator))
            return model(part["losses"]), partial(step.loss_func, part)

        def finish(store):
            if self.planning == "begin_step":
                step.validate()
            report = step.report(store)
            return {**report, "is_empty": step.is_empty}

        return StepPlan(forward_step, data, number, finish)


def batch_f(layout: str, **masks):
    """Fixture F with further masks, or another `loss_mask`."""
    parsed = Layout.parse(layout)
    fields = {"loss_mask": F_MASK, "pair_mask": PAIR_MASK, **masks}
    return batch_of(
        F_LOSSES, fields.pop("loss_mask"), even(4, parsed.dp, parsed.num_microbatches), **fields
    )


def run_planned(pool, batch, layout: str, make, planning, per_token):
    """(gradient of every stage, report of every rank)."""
    parsed = Layout.parse(layout)
    results = pool.run(
        run_on_rank,
        batch,
        parsed,
        Planned(make, planning),
        per_token,
        {},
        world_size=parsed.world_size,
    )
    return results[0][0], [report for _, report, _ in results]


def assert_planned(pool, batch, layout, make, planning, per_token, expected, **entries):
    """J as gradient of every stage and in every report, and other entries of the reports."""
    gradients, reports = run_planned(pool, batch, layout, make, planning, per_token)
    where = (layout, planning, per_token)
    for report in reports:
        assert abs(report["loss"] - expected) <= 1e-12 * max(1, abs(expected)), (where, report)
        for name, value in entries.items():
            assert report[name] == value, (where, name, report)
    bound = (1e-6 if per_token else 1e-12) * max(1, abs(expected))
    for gradient in gradients.values():
        assert abs(gradient - expected) <= bound, (where, gradient, expected)


def one_term(mode: str, mask_key: str = "loss_mask", **options) -> LossTerm:
    """A term whose losses are those of the batch."""
    return LossTerm("term", prescribed_losses, mode, mask_key=mask_key, **options)
