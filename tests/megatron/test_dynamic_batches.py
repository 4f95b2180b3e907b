"""Property: batches whose shape nobody fixed give the gradient of the global batch all the same.

Another number of microbatches on every data-parallel rank and at every step, microbatches of other
shapes, ranks without a valid token or without a sequence; whole-model gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from pairs import all_pairs
from prescribed import batch_of, prescribed_losses
from test_exactness import ALL_MODES, FIELDS, assert_exact

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.testing import GlobalBatch, Layout, ragged_batch, run_global_batch
from megatron_lossagg.testing.model.scalar_model import build_scalar_chunks
from megatron_lossagg.testing.run import StepPlan
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.cases import ALL_REGIMES, Case

LONG = pytest.mark.conformance
MODES = [
    replace(plan, sequence_count=("valid", "nominal")[index % 2])
    for index, plan in enumerate(ALL_MODES)
]
# Rank 0 runs three microbatches of 2, 1 and 3 rows, rank 1 a single one.
UNEVEN = (((0, 1), (2,), (3, 4, 5)), ((6, 7),))


def cases(*short):
    """(layout, regime, planning): those named, and in the long matrix all pairs of them."""
    texts = dict.fromkeys(text for text, _, _ in short)
    others = all_pairs(texts, ALL_REGIMES, ("begin_step", "wrap"))
    return [*short, *(pytest.param(*c, marks=LONG) for c in others if c not in short)]


@pytest.mark.parametrize(
    ("text", "regime", "planning"),
    cases(("D=2 M=3", "R1", "wrap"), ("PP=2 D=2 M=3", "R3", "begin_step")),
)
def test_other_numbers_of_microbatches_on_every_rank(rank_pool, text, regime, planning):
    """M = 3 and M = 1: each rank's schedule divides by its own number."""
    layout = Layout.parse(text)
    options = {"overrides": {"variable_seq_lengths": True}} if layout.pp > 1 else {}
    batch = ragged_batch(8, assignment=UNEVEN, extra_fields=FIELDS)
    assert_exact(rank_pool, batch, Case(layout, regime, planning), MODES, **options)


@dataclass(frozen=True)
class Trimmed(AggregatorPlan):
    """Each microbatch as wide as its longest row."""

    def __call__(self, context):
        for index, microbatch in enumerate(context.microbatches):
            columns = microbatch["loss_mask"].any(dim=0).nonzero()
            multiple = context.layout.width_multiple
            longest = int(columns.max()) + 1 if columns.numel() else 1
            width = -(-longest // multiple) * multiple
            context.microbatches[index] = {
                name: field[:, :width] if field.dim() > 1 else field
                for name, field in microbatch.items()
            }
        return super().__call__(context)


@pytest.mark.parametrize(
    ("text", "regime", "planning"),
    cases(
        ("PP=2 D=2 M=4", "R1", "wrap"),
        ("C=2 D=2 M=4", "R3", "begin_step"),
    ),
)
def test_microbatches_of_other_widths(rank_pool, text, regime, planning):
    """Padded to the longest row of each, as loaders that sort by length do."""
    layout = Layout.parse(text)
    batch = ragged_batch(16, dp=2, num_microbatches=4, extra_fields=FIELDS)
    lengths = {
        int(batch.rows["loss_mask"][list(rows)].any(dim=0).sum())
        for rank in batch.assignment
        for rows in rank
    }
    assert len(lengths) > 2, "the microbatches differ"
    plans = [Trimmed(**vars(plan)) for plan in ALL_MODES]
    options = {"overrides": {"variable_seq_lengths": True}} if layout.pp > 1 else {}
    assert_exact(rank_pool, batch, Case(layout, regime, planning), plans, **options)


@pytest.mark.parametrize(
    ("text", "regime", "planning"),
    cases(("PP=2 D=2 M=2", "R1", "begin_step"), ("C=2 D=2 M=2", "R3", "wrap")),
)
@pytest.mark.parametrize("what", ["no valid token", "no sequence"])
def test_a_rank_that_has_nothing(rank_pool, text, regime, planning, what):
    """Rank 1's rows are masked, or only pad the batch (sample_mask 0); rank 0's count alone."""
    layout = Layout.parse(text)
    batch = ragged_batch(8, dp=2, num_microbatches=2, extra_fields=FIELDS)
    last = torch.arange(8) >= 4
    rows = dict(batch.rows)
    if what == "no sequence":
        rows["sample_mask"] = (~last).double()
    else:
        rows["loss_mask"] = rows["loss_mask"] * (~last).unsqueeze(1)
    batch = GlobalBatch(rows, batch.assignment)
    assert_exact(rank_pool, batch, Case(layout, regime, planning), MODES)


def _steps(text, numbers, per_token, planning):
    """One aggregator through steps of other numbers of microbatches; the gradient of each."""
    layout = Layout.parse(text)
    chunks = build_scalar_chunks(layout, calculate_per_token_loss=per_token)
    made = []
    found = []
    for number in numbers:

        def plan(context, number=number):
            if not made:
                made.append(
                    LossAggregator(
                        prescribed_losses,
                        loss_agg_mode="seq-mean-token-mean",
                        model_config=context.model_config,
                        weight_dtype=torch.float64,
                    )
                )
            [aggregator] = made
            if planning == "wrap":
                step = aggregator
                data = aggregator.wrap(
                    [iter(context.microbatches) for _ in context.chunks], num_microbatches=number
                )
            else:
                step = aggregator.begin_step(context.microbatches)
                data = step.data_iterator(len(context.chunks))

            def forward_step(data_iterator, model):
                microbatch = slice_for_cp(next(data_iterator))
                return model(microbatch["loss_mask"]), partial(step.loss_func, microbatch)

            return StepPlan(forward_step, data, number, lambda store: step.validate())

        rows = 2 * layout.dp * number
        losses = torch.arange(rows * 4, dtype=torch.float64).reshape(rows, 4)
        mask = [[1, 1, 1, 0]] * (rows - 1) + [[1, 0, 0, 0]]
        indices = torch.arange(rows).reshape(layout.dp, number, 2).tolist()
        assignment = tuple(tuple(tuple(m) for m in rank) for rank in indices)
        batch = batch_of(losses.tolist(), mask, assignment)
        run = run_global_batch(batch, replace(layout, num_microbatches=number), plan, chunks=chunks)
        expected = sum(
            row[m > 0].mean().item() for row, m in zip(losses, torch.tensor(mask), strict=True)
        )
        gradients = run.gradients and [g.item() for g in run.gradients.values()]
        found.append((gradients, expected / rows))
    return found


@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
@pytest.mark.parametrize("text", ["D=2 M=1", "PP=2 VPP=2 D=2 M=2"])
def test_other_numbers_of_microbatches_at_every_step(rank_pool, text, per_token, planning):
    """M = 4, 2, 3 with one aggregator: nothing of a step is remembered in the next."""
    layout = Layout.parse(text)
    numbers = (4, 2, 6) if layout.vpp > 1 else (4, 2, 3)  # whole groups, in an interleaved schedule
    results = rank_pool.run(
        _steps, text, numbers, per_token, planning, world_size=layout.world_size
    )
    for gradients, expected in results[0]:
        assert len(gradients) == layout.pp * layout.vpp
        for gradient in gradients:
            assert abs(gradient - expected) <= (1e-6 if per_token else 1e-12) * abs(expected)
