"""Property: the whole model's gradient and the reported J are those of the global batch.

float64, the real GPTModel, schedules, DDP and finalize_model_grads; the reference is one process,
the whole batch, plain loops and autograd (`megatron_lossagg.testing.reference`, which imports
nothing of the plugin). The batch has a fully masked sequence, an all-masked microbatch, holes in
masks, and other token counts on every data-parallel rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_lossagg.testing.batch.global_batch import GlobalBatch, ragged_batch
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.case_runs import case_on_rank, run_cases
from megatron_lossagg.verification.cases import (
    ALL_REGIMES,
    DEFAULT_LAYOUTS,
    GRADIENT_BOUNDS,
    REGIMES,
    Case,
    default_cases,
    standard_batch,
)
from megatron_lossagg.verification.references import references_on_rank

LONG = pytest.mark.conformance
# Every layout, regime and way to plan, each with each other one; the rest is the long matrix.
PAIRED = [
    Case(layout, regime, planning, data)
    for index, (layout, data) in enumerate(DEFAULT_LAYOUTS)
    for regime, planning in zip(
        REGIMES, (("begin_step", "wrap"), ("wrap", "begin_step"))[index % 2], strict=True
    )
]
CASES = [
    case if case in PAIRED else pytest.param(case, marks=LONG)
    for case in default_cases(DEFAULT_LAYOUTS, REGIMES, ("begin_step", "wrap"))
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.layout}-{c.regime}-{c.planning}-{c.data}".replace(" ", ",")
)
def test_every_mode_in_every_layout(rank_pool, case):
    """Every mode: gradient <= 1e-12 (R3: 1e-6, Megatron divides in float32), loss <= 1e-12."""
    [result] = run_cases(rank_pool, [case])
    assert len(result.modes) == 6
    assert result.passed, result


def test_the_standard_batch_is_nasty():
    """The batch has what the module docstring claims, in every layout with several microbatches."""
    for layout, _ in DEFAULT_LAYOUTS:
        batch = standard_batch(layout)
        mask = batch.rows["loss_mask"]
        assert (mask.sum(dim=1) == 0).any(), "a fully masked sequence"
        holes = (mask[:, :-2] == 1) & (mask[:, 1:-1] == 0) & (mask[:, 2:] == 1)
        assert holes.any(), "a hole in a mask"
        per_rank = [
            [int(mask[list(rows)].sum()) for rows in microbatches]
            for microbatches in batch.assignment
        ]
        if layout.dp * layout.num_microbatches > 1:
            assert any(0 in counts for counts in per_rank), "an all-masked microbatch"
        assert len({sum(counts) for counts in per_rank}) == layout.dp, "other counts on each rank"


def assert_exact(pool, batch: GlobalBatch, case: Case, plans: list[AggregatorPlan], **gpt_options):
    gpt = TinyGPT(**gpt_options)
    as_in_case = {"planning": case.planning, "returns": ALL_REGIMES[case.regime][1]}
    plans = [replace(plan, **as_in_case) for plan in plans]
    [references] = pool.run(references_on_rank, gpt, batch, plans, world_size=1)
    results = pool.run(case_on_rank, gpt, batch, case, plans, world_size=case.layout.world_size)
    for index, (loss, gradients) in enumerate(references):
        error = relative_error(results[0][index][0], gradients)
        assert error <= GRADIENT_BOUNDS[case.regime], (plans[index], error)
        for rank in results:
            if "loss" in rank[index][1]:
                assert abs(rank[index][1]["loss"] - loss) <= 1e-12 * abs(loss)


ALL_MODES = [
    AggregatorPlan("token-mean"),
    AggregatorPlan("seq-mean-token-sum"),
    AggregatorPlan("seq-mean-token-mean"),
    AggregatorPlan("seq-mean-token-sum-norm", loss_scale_factor=5, norm_semantics="seq-mean"),
]
FIELDS = ("advantages", "old_log_probs")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("text", ["PP=2 D=2 M=4", "C=2 D=2 M=2"])
def test_nominal_sequence_count(rank_pool, text, regime):
    """B may be all rows, also under context parallelism, where each row is on C ranks."""
    layout = Layout.parse(text)
    plans = [replace(plan, sequence_count="nominal") for plan in ALL_MODES]
    assert_exact(rank_pool, standard_batch(layout), Case(layout, regime), plans)


@pytest.mark.parametrize(
    ("text", "planning", "regime"),
    [
        ("C=2 D=2 M=2", "begin_step", "R3"),
        ("PP=2 VPP=2 C=2 M=4", "wrap", "R1"),
        *(
            pytest.param(text, planning, regime, marks=LONG)
            for text in ("C=2 D=2 M=2", "PP=2 VPP=2 C=2 M=4")
            for planning in ("begin_step", "wrap")
            for regime in REGIMES
        ),
    ],
)
def test_sample_mask_under_context_parallelism(rank_pool, text, planning, regime):
    """Rows whose sample_mask is 0 count nowhere, though their own mask says otherwise."""
    layout = Layout.parse(text)
    batch = standard_batch(layout)
    sample_mask = torch.ones(batch.num_rows)
    longest = batch.rows["loss_mask"].sum(dim=1).argsort(descending=True)
    sample_mask[longest[:3]] = 0
    batch = GlobalBatch({**batch.rows, "sample_mask": sample_mask}, batch.assignment)
    plans = [replace(p, sequence_count=c) for p in ALL_MODES for c in ("valid", "nominal")]
    assert_exact(rank_pool, batch, Case(layout, regime, planning), plans)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("text", ["D=2 M=2", "PP=2 D=2 M=2"])
def test_ranks_with_another_number_of_sequences(rank_pool, text, regime):
    """Rank 0 has microbatches of 3 rows, rank 1 of 1 row."""
    layout = Layout.parse(text)
    assignment = (((0, 1, 2), (3, 4, 5)), ((6,), (7,)))
    batch = ragged_batch(8, assignment=assignment, extra_fields=FIELDS)
    assert_exact(rank_pool, batch, Case(layout, regime), ALL_MODES)


@pytest.mark.parametrize("regime", REGIMES)
def test_tied_embeddings_and_sequence_parallelism(rank_pool, regime):
    """What finalize_model_grads reduces beyond DDP: shared embeddings over pp, norms over tp."""
    layout = Layout(pp=2, tp=2, num_microbatches=2, sequence_parallel=True)
    batch = standard_batch(layout)
    assert_exact(rank_pool, batch, Case(layout, regime), ALL_MODES[:2], share_embeddings=True)
