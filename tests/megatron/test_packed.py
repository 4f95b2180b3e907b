"""Property: packed sequences give the loss and the whole model's gradient of the padded rows.

The reference is that of `test_exactness.py`, on padded rows: it knows nothing of packing. The batch
has fully masked sequences (packed, they are one token long), an all-masked microbatch and holes in
masks; packing adds padding and an empty sequence.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairs import all_pairs
from test_exactness import ALL_MODES, assert_exact

from megatron_lossagg.schedule import CP_GRADIENTS
from megatron_lossagg.testing import (
    GlobalBatch,
    Layout,
    RankFailure,
    SumLossPlan,
    TinyGPT,
    build_model_chunks,
    model_output,
    pack_batch,
    pack_rows,
    reference_run,
    relative_error,
    run_global_batch,
    token_log_probs,
)
from megatron_lossagg.testing.batch.packed_batch import PACKED_FORMS
from megatron_lossagg.testing.layout.token_positions import positions_of_ranks, sequence_of_token
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.case_runs import run_cases
from megatron_lossagg.verification.cases import (
    DEFAULT_LAYOUTS,
    DEFAULT_MODES,
    Case,
    standard_batch,
)

LONG = pytest.mark.conformance

ROWS = {
    "tokens": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
    "loss_mask": torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]),
    "unit_ids": torch.tensor([4, 5, 6]),
}


def test_pack_rows_by_hand():
    """Cut after the last valid token, padded inside the sequences or between them."""
    packed = pack_rows(ROWS, form="cu_seqlens")
    assert packed["tokens"].tolist() == [[1, 2, 3, 5, 9]]
    assert packed["loss_mask"].tolist() == [[1, 0, 1, 0, 1]]
    assert packed["cu_seqlens"].tolist() == [0, 3, 4, 5, 5]
    assert packed["unit_ids"].tolist() == [4, 5, 6, 1]
    packed = pack_rows(ROWS, form="cu_seqlens", multiple=2)
    assert packed["tokens"].tolist() == [[1, 2, 3, 1, 5, 1, 9, 1]]
    assert packed["cu_seqlens"].tolist() == [0, 4, 6, 8, 8]
    assert "cu_seqlens_padded" not in packed
    packed = pack_rows(ROWS, multiple=2, width=16)
    assert packed["tokens"].tolist() == [[1, 2, 3, 1, 1, 1, 5, 1, 1, 1, 9, 1, 1, 1, 1, 1]]
    assert packed["loss_mask"].sum() == 3
    assert packed["cu_seqlens"].tolist() == [0, 3, 4, 5, 5]
    assert packed["cu_seqlens_padded"].tolist() == [0, 6, 10, 16, 16]
    assert packed["cu_seqlens"].dtype == torch.int32


def test_pack_rows_explains_what_it_cannot_do():
    """The argument, and what it should be."""
    with pytest.raises(ValueError, match="form must be one of cu_seqlens, cu_seqlens_padded, got"):
        pack_rows(ROWS, form="thd")
    with pytest.raises(ValueError, match="multiple of 2 and at least 14, got 12"):
        pack_rows(ROWS, multiple=2, width=12)
    with pytest.raises(ValueError, match="multiple of 2 and at least 14, got 15"):
        pack_rows(ROWS, multiple=2, width=15)


def test_packed_positions_by_hand():
    """Each sequence is cut on its own; every token of the padding is a sequence of its own."""
    packed = pack_rows(ROWS, form="cu_seqlens", multiple=4)
    first, second = positions_of_ranks(packed, 2)
    assert first.tolist() == [0, 3, 4, 7, 8, 11]
    assert second.tolist() == [1, 2, 5, 6, 9, 10]
    sequences = sequence_of_token(6, [0, 0, 3, 3, 5], [0, 2, 0, 1]).tolist()
    assert sequences == [1, 1, -3, 3, -5, -6]
    with pytest.raises(ValueError, match="must fill the row of 12 tokens, got boundaries up to 4"):
        positions_of_ranks({**packed, "cu_seqlens": torch.tensor([0, 4])}, 2)


def logits_of(microbatch):
    """Logits of one microbatch, in one process."""
    gpt = TinyGPT(num_layers=2)
    [model] = build_model_chunks(gpt, Layout(), wrap_with_ddp=False)
    with torch.no_grad():
        return model_output(model, microbatch)


def test_a_sequence_sees_itself_alone(rank_pool):
    """Packed logits are those of each sequence alone; what the padding holds changes nothing."""
    generator = torch.Generator().manual_seed(0)
    lengths, padded = [0, 5, 1, 0, 0, 3, 0], [0, 6, 1, 2, 0, 3, 2]
    starts = [sum(padded[:i]) for i in range(8)]
    microbatch = {
        "tokens": torch.randint(32, (1, 17), generator=generator),
        "position_ids": torch.zeros(1, 17, dtype=torch.int64),
        "cu_seqlens": torch.tensor([sum(lengths[:i]) for i in range(8)]),
        "cu_seqlens_padded": torch.tensor(starts),
    }
    is_real = torch.zeros(17, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=False):
        microbatch["position_ids"][0, start : start + length] = torch.arange(length)
        is_real[start : start + length] = True
    [packed] = rank_pool.run(logits_of, microbatch, world_size=1)
    assert packed.isfinite().all()
    for start, length in zip(starts, lengths, strict=False):
        if length:
            tokens = microbatch["tokens"][:, start : start + length]
            row = {"tokens": tokens, "position_ids": torch.arange(length)[None]}
            [alone] = rank_pool.run(logits_of, row, world_size=1)
            torch.testing.assert_close(
                packed[:, start : start + length], alone, rtol=1e-13, atol=1e-13
            )
    other = dict(microbatch, tokens=microbatch["tokens"].where(is_real, torch.tensor(31)))
    assert (other["tokens"] != microbatch["tokens"]).sum() > 5
    [again] = rank_pool.run(logits_of, other, world_size=1)
    assert torch.equal(again[:, is_real], packed[:, is_real])
    assert not torch.equal(again, packed)


def negative_log_probs(logits, rows):
    return -token_log_probs(logits, rows["labels"])


@pytest.mark.parametrize(
    "text",
    [
        "PP=2 D=2 M=2",
        "C=2 D=2 M=2",
        *(
            pytest.param(t, marks=LONG)
            for t in ("C=4 M=2", "PP=2 VPP=2 M=4", "PP=2 VPP=2 C=2 M=4", "TP=2 SP=1 C=2 M=2")
        ),
    ],
)
def test_microbatches_of_different_widths_without_the_plugin(rank_pool, text):
    """A plain sum, so that the bench alone is tested; pipelines need variable_seq_lengths."""
    layout = Layout.parse(text)
    batch = standard_batch(layout)
    plan = SumLossPlan(1.0)
    [(loss, gradients)] = rank_pool.run(
        reference_run, TinyGPT(), batch, negative_log_probs, "token-sum", world_size=1
    )
    gpt = TinyGPT(overrides={"variable_seq_lengths": True})
    for form in PACKED_FORMS:
        packed = pack_batch(batch, layout, form, same_width=False)
        assert len(set(packed.shapes(0))) > 1
        results = rank_pool.run(
            run_global_batch, packed, layout, plan, gpt=gpt, world_size=layout.world_size
        )
        assert relative_error(results[0].gradients, gradients) <= 1e-12
        assert all(abs(r.report - loss) <= 1e-12 * loss for r in results)


def test_what_does_not_fit_is_refused(rank_pool):
    """Widths in a pipeline, lengths and boundaries, before anything is sent."""
    layout = Layout.parse("PP=2 M=2")
    packed = pack_batch(standard_batch(layout), layout, same_width=False)
    with pytest.raises(RankFailure, match=r"need one shape, got \[\(1, \d+\), \(1, \d+\)\] on"):
        rank_pool.run(run_global_batch, packed, layout, SumLossPlan(1.0), world_size=2)
    with pytest.raises(RankFailure, match=r"at most max_sequence_length=4 long, got 1\d"):
        rank_pool.run(
            run_global_batch,
            packed,
            layout,
            SumLossPlan(1.0),
            gpt=TinyGPT(max_sequence_length=4),
            world_size=2,
        )
    layout = Layout.parse("C=2 M=2")
    with pytest.raises(RankFailure, match=r"must be a multiple of 4 for layout 'C=2 M=2', got \["):
        rank_pool.run(
            run_global_batch,
            pack_batch(standard_batch(layout), Layout(num_microbatches=2)),
            layout,
            SumLossPlan(1.0),
            world_size=2,
        )


def cases(text, regime):
    """Both forms, planned in both ways; under context parallelism also the other conventions."""
    layout = Layout.parse(text)
    case = Case(layout, regime, data=dict(DEFAULT_LAYOUTS).get(layout, "all"))
    return [
        *(
            replace(case, planning=planning, form=form)
            for planning in ("begin_step", "wrap")
            for form in PACKED_FORMS
        ),
        *(
            replace(case, form=form, cp_gradient=cp_gradient)
            for cp_gradient in (CP_GRADIENTS[1:] if layout.cp > 1 else ())
            for form in ("rows", "cu_seqlens_padded")
        ),
    ]


@pytest.mark.parametrize(
    ("text", "regime"),
    [
        pytest.param(text, regime, marks=LONG)
        for text, regime in (
            ("D=4 M=4", "R2"),
            ("TP=2 PP=2 M=4", "R3"),
            ("PP=2 VPP=2 M=4", "R1"),
            ("C=4 M=2", "R4"),
            ("PP=2 VPP=2 C=2 M=4", "R3"),
            ("TP=2 SP=1 C=2 M=2", "R2"),
        )
    ],
)
def test_every_mode_packed_in_every_layout(rank_pool, text, regime):
    """Every mode, planning, form of packing and convention of context parallelism."""
    for result in run_cases(rank_pool, cases(text, regime)):
        assert len(result.modes) == 6
        assert result.passed, result


@pytest.mark.parametrize(
    ("text", "regime", "planning", "form", "cp_gradient"),
    [
        ("PP=2 D=2 M=2", "R1", "begin_step", "cu_seqlens_padded", "local"),
        ("PP=2 D=2 M=2", "R3", "wrap", "cu_seqlens", "local"),
        ("C=2 D=2 M=2", "R1", "wrap", "cu_seqlens_padded", "local"),
        ("C=2 D=2 M=2", "R3", "begin_step", "cu_seqlens_padded", "gathered"),
        ("C=2 D=2 M=2", "R1", "begin_step", "cu_seqlens", "replicated-value"),
    ],
)
def test_every_mode_packed(rank_pool, text, regime, planning, form, cp_gradient):
    """A selection of the matrix below, for each run."""
    case = Case(Layout.parse(text), regime, planning, form=form, cp_gradient=cp_gradient)
    [result] = run_cases(rank_pool, [case])
    assert len(result.modes) == 6
    assert result.passed, result


def test_a_planted_fault_shows_in_packed_data(rank_pool):
    """The comparison can fail: counts per context-parallel rank, in packed form."""
    case = Case(Layout.parse("C=2 D=2 M=2"), form="cu_seqlens_padded")
    plans = {"seq-mean-token-mean": AggregatorPlan("seq-mean-token-mean")}
    [result] = run_cases(rank_pool, [case], plans, fault="sequence-once-per-cp-rank")
    assert result.modes[0].gradient_error > 1e-3


@pytest.mark.parametrize("form", PACKED_FORMS)
def test_nothing_valid_anywhere(rank_pool, form):
    """All masks 0: loss and gradient are exactly 0."""
    layout = Layout.parse("C=2 D=2 M=2")
    batch = standard_batch(layout)
    rows = {**batch.rows, "loss_mask": torch.zeros_like(batch.rows["loss_mask"])}
    packed = pack_batch(GlobalBatch(rows, batch.assignment), layout, form)
    results = rank_pool.run(
        run_global_batch, packed, layout, AggregatorPlan("token-mean"), world_size=4
    )
    assert all(result.report["loss"] == 0 for result in results)
    assert all(not gradient.any() for gradient in results[0].gradients.values())


def test_middle_stages_need_the_boundaries(rank_pool):
    """Data on the end stages alone: refused, since attention in between would mix sequences."""
    layout = Layout.parse("PP=4 M=4")
    packed = pack_batch(standard_batch(layout), layout)
    plan = AggregatorPlan("token-mean", data="tp-rank-0")
    with pytest.raises(RankFailure, match="middle stages .layout 'PP=4 M=4'., got data='tp-rank"):
        rank_pool.run(run_global_batch, packed, layout, plan, world_size=4)


@pytest.mark.parametrize(
    ("text", "regime", "form"),
    [
        ("C=2 D=2 M=2", "R1", "cu_seqlens_padded"),
        *(
            pytest.param(text, regime, form, marks=LONG)
            for text, regime, form in all_pairs(
                ("C=2 D=2 M=2", "PP=2 D=2 M=2"), ("R1", "R3"), PACKED_FORMS
            )
            if (text, regime, form) != ("C=2 D=2 M=2", "R1", "cu_seqlens_padded")
        ),
    ],
)
def test_nominal_counts_and_sample_mask(rank_pool, text, regime, form):
    """Fully masked sequences are rows, empty ones are not, and those of sample_mask 0 are not."""
    layout = Layout.parse(text)
    batch = standard_batch(layout)
    sample_mask = torch.ones(batch.num_rows)
    sample_mask[batch.rows["loss_mask"].sum(dim=1).argsort(descending=True)[:3]] = 0
    batch = GlobalBatch({**batch.rows, "sample_mask": sample_mask}, batch.assignment)
    plans = [replace(plan, sequence_count="nominal") for plan in ALL_MODES]
    assert_exact(rank_pool, batch, Case(layout, regime, form=form), plans)


@pytest.mark.parametrize("regime", ["R1", "R3"])
@pytest.mark.parametrize("text", [pytest.param(t, marks=LONG) for t in ("C=2 D=2 M=2", "PP=4 M=4")])
def test_deferred_denominators_packed(rank_pool, text, regime):
    """Counted at the end, from packed data."""
    modes = {label: replace(plan, denominators="deferred") for label, plan in DEFAULT_MODES.items()}
    case = Case(Layout.parse(text), regime, "wrap")
    for result in run_cases(rank_pool, [replace(case, form=form) for form in PACKED_FORMS], modes):
        assert result.passed, result
