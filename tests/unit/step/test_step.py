"""A planned step in one process: values, gradients, what is yielded, ranks without data."""

from __future__ import annotations

import math

import pytest
import torch
from one_process import (
    ALL_MODES,
    FIXTURE_F_VALUES,
    MODES,
    REGIMES,
    FakeGroup,
    fixture_f,
    make_aggregator,
    make_microbatch,
    run_schedule,
    run_step,
)

from megatron_lossagg import GlobalCounts, LossAggError, ParallelGroups


def gradients(microbatches, step, per_token):
    """Gradients as they would reach the optimizer: under R3 finalize divides by T."""
    divisor = max(int(step.counts.num_tokens), 1) if per_token else 1
    return [m["losses"].grad / divisor for m in microbatches]


@REGIMES
@pytest.mark.parametrize("sequence_count", ["valid", "nominal"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize(("mode", "options", "valid", "nominal"), FIXTURE_F_VALUES)
def test_fixture_f(mode, options, valid, nominal, num_microbatches, sequence_count, per_token):
    """Public reports 4a and 22: the same value and gradient for every M, an empty row included."""
    aggregator = make_aggregator(
        mode, per_token=per_token, sequence_count=sequence_count, **options
    )
    microbatches = fixture_f(num_microbatches)
    step = aggregator.begin_step(microbatches)
    value = step.report(run_step(step))["loss"]
    step.validate()
    assert value == pytest.approx(valid if sequence_count == "valid" else nominal, rel=1e-14)
    mask = torch.cat([m["loss_mask"] for m in microbatches]).double()
    grads = torch.cat(gradients(microbatches, step, per_token))
    losses = torch.cat([m["losses"].detach() for m in microbatches])
    assert (grads * losses).sum().item() == pytest.approx(value, rel=1e-14)
    assert torch.equal(grads != 0, mask != 0)
    assert [int(c) for c in list(vars(step.counts).values())[:3]] == [7, 3, 4]
    assert not step.is_empty


@REGIMES
@ALL_MODES
def test_garbage_at_masked_tokens_changes_nothing(mode, options, per_token):
    """Public report 13: NaN and inf at masked tokens leave value and gradients bit for bit."""
    results = []
    for garbage in (9.0, math.nan, math.inf):
        losses = [[2.0, garbage], [4.0, -garbage]]
        microbatches = [make_microbatch([row], [[1, 0]]) for row in losses]
        step = make_aggregator(mode, per_token=per_token, **options).begin_step(microbatches)
        value = step.report(run_step(step))["loss"]
        step.validate()
        results.append((value, [g.tolist() for g in gradients(microbatches, step, per_token)]))
    assert results[0] == results[1] == results[2]
    assert all(grad[0][1] == 0.0 and grad[0][0] > 0 for grad in results[0][1])


@REGIMES
@ALL_MODES
def test_nan_at_a_valid_token_shows(mode, options, per_token):
    """Public report 13: NaN that counts reaches the report; validate does not call it a fault."""
    step = make_aggregator(mode, per_token=per_token, **options).begin_step(
        [make_microbatch([[math.nan, 1.0]], [[1, 1]]), make_microbatch([[1.0, 1.0]], [[1, 1]])]
    )
    assert math.isnan(step.report(run_step(step))["loss"])
    step.validate()


@REGIMES
@pytest.mark.parametrize("sequence_count", ["valid", "nominal"])
@ALL_MODES
def test_step_without_a_valid_token(mode, options, sequence_count, per_token):
    """Public reports 4c and 22: in every mode loss exactly 0, zero gradients, is_empty."""
    aggregator = make_aggregator(
        mode, per_token=per_token, sequence_count=sequence_count, **options
    )
    microbatches = [make_microbatch([[math.nan, 2.0]], [[0, 0]]) for _ in range(2)]
    step = aggregator.begin_step(microbatches)
    assert step.is_empty
    yielded = next(step.data_iterator(1)[0])
    loss = step.loss_func(yielded, yielded["losses"])[0]
    assert loss.item() == 0.0 and loss.requires_grad
    assert step.report(run_step(step)) == {"loss": 0.0}
    step.validate()
    assert step.is_empty
    assert all(torch.equal(m["losses"].grad, torch.zeros(1, 2).double()) for m in microbatches)


def test_padding_rows_are_marked_by_sample_mask():
    """Public report 9: pad rows whose mask is 1 count nowhere, in any mode."""
    for mode, value in (
        ("token-mean", 1.0),
        ("seq-mean-token-sum", 2.0),
        ("seq-mean-token-mean", 1.0),
    ):
        for sequence_count in ("valid", "nominal"):
            step = make_aggregator(mode, sequence_count=sequence_count).begin_step(
                [
                    make_microbatch(
                        [[1.0, 1.0], [1.0, 1.0]], [[1, 1], [1, 1]], sample_mask=torch.tensor(m)
                    )
                    for m in ([1, 1], [1, 0])
                ]
            )
            assert step.report(run_step(step))["loss"] == value
            step.validate()


@REGIMES
def test_number_of_microbatches_may_change_from_step_to_step(per_token):
    """Public report 21: M=4 then M=1 on one aggregator, then other masks: nothing is remembered."""
    aggregator = make_aggregator(per_token=per_token)
    for masks in ([[1, 1]] * 4, [[1, 1]], [[1, 0], [1, 1], [0, 0]]):
        microbatches = [make_microbatch([[1.0, 1.0]], [mask]) for mask in masks]
        step = aggregator.begin_step(microbatches)
        assert step.num_microbatches == len(masks)
        assert step.report(run_step(step))["loss"] == 1.0
        step.validate()
        total = sum(g.sum() for g in gradients(microbatches, step, per_token))
        assert total.item() == pytest.approx(1.0, rel=1e-14)


def test_report_is_not_rescaled_with_the_loss():
    """Public report 18: the schedule divides the returned loss in place; the report stays 6."""
    step = make_aggregator().begin_step([make_microbatch([[6.0]], [[1]]) for _ in range(3)])
    store = []
    for microbatch in step.microbatches:
        loss, report = step.loss_func(microbatch, microbatch["losses"])
        before = report["loss"].clone()
        loss /= 3
        assert torch.equal(report["loss"], before)
        store.append(report)
    step.validate()
    assert step.report(store)["loss"] == 6.0


def test_public_report_metric_per_microbatch():
    """Public report 12: the step value is a sum of parts, 1.0 at every M."""
    for num_microbatches in (1, 2, 4):
        width = 8 // num_microbatches
        step = make_aggregator().begin_step(
            [make_microbatch([[1.0] * width], [[1] * width]) for _ in range(num_microbatches)]
        )
        assert step.report(run_step(step))["loss"] == pytest.approx(1.0, rel=1e-15)


def test_forward_only_and_non_loss_data_report_the_same_value():
    """No backward, or collect_non_loss_data=True: the same J, and a report alone in the latter."""
    step = make_aggregator().begin_step(fixture_f(4))
    with torch.no_grad():
        forward_only = step.report(run_step(step, backward=False))
        collected = [
            step.loss_func(microbatch, microbatch["losses"], non_loss_data=True)
            for microbatch in step.microbatches
        ]
    trained = step.report(run_step(step))
    assert forward_only == trained == step.report(collected)
    assert trained["loss"] == pytest.approx(20 / 7)


def test_per_token_path_returns_int32_counts():
    """Megatron adds num_tokens to an int32 counter: true counts, in every mode."""
    for mode, options in MODES:
        step = make_aggregator(mode, per_token=True, **options).begin_step(fixture_f(4))
        found = [step.loss_func(m, m["losses"])[1] for m in step.microbatches]
        assert [n.item() for n in found] == [4, 1, 2, 0]
        assert all(n.dtype == torch.int32 and n.shape == () for n in found)


def test_returned_loss_suits_backward():
    """One element, not a view, fresh: Megatron's custom_backward demands it."""
    step = make_aggregator().begin_step(fixture_f(1))
    microbatch = step.microbatches[0]
    loss, report = step.loss_func(microbatch, microbatch["losses"])
    assert loss.shape == () and loss._base is None and not loss.is_leaf
    assert not report["loss"].requires_grad


def test_caller_dicts_are_not_changed():
    """Yielded dicts are shallow copies: same tensors, weights added, sample_mask left out."""
    extra = object()
    microbatch = make_microbatch([[1.0]], [[1]], sample_mask=torch.ones(1), extra=extra)
    before = dict(microbatch)
    step = make_aggregator().begin_step([microbatch, microbatch])
    first, second = step.data_iterator(2)
    for yielded in (next(first), next(second), step.microbatches[1]):
        assert set(yielded) == {"losses", "loss_mask", "extra", "loss_weights"}
        assert all(yielded[key] is before[key] for key in ("losses", "loss_mask", "extra"))
        yielded.clear()
    assert microbatch.keys() == before.keys()
    assert all(microbatch[key] is before[key] for key in before)
    assert "loss_weights" in next(first)


def test_weights_may_ride_in_the_mask():
    """weights_key="loss_mask": weights are yielded under it; the caller keeps the mask."""
    microbatch = make_microbatch([[4.0, 2.0]], [[1, 1]])
    step = make_aggregator(weights_key="loss_mask").begin_step([microbatch])
    assert step.microbatches[0]["loss_mask"].tolist() == [[0.5, 0.5]]
    assert microbatch["loss_mask"].tolist() == [[1, 1]]
    assert step.report(run_step(step))["loss"] == 3.0
    step.validate()


def test_same_dict_twice_counts_twice():
    """The list says what the batch is, even if two entries are one object."""
    microbatch = make_microbatch([[3.0, 9.0]], [[1, 0]])
    step = make_aggregator().begin_step([microbatch, microbatch])
    assert int(step.counts.num_tokens) == 2
    assert step.report(run_step(step))["loss"] == 3.0
    step.validate()
    assert microbatch["losses"].grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masks_of_any_dtype_layout_and_graph(kind):
    """Bool, int and float masks, transposed storage, and a mask that requires grad."""
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]]).t().contiguous().t().to(kind)
    if kind.is_floating_point:
        mask.requires_grad_()
    microbatch = make_microbatch([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[0]])
    step = make_aggregator("seq-mean-token-sum").begin_step([{**microbatch, "loss_mask": mask}])
    assert step.report(run_step(step))["loss"] == (1 + 3 + 6) / 2
    step.validate()
    assert not step.microbatches[0]["loss_weights"].requires_grad and mask.grad is None


@REGIMES
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_microbatch_without_positions(shape, per_token):
    """Width 0 or no rows beside a normal microbatch: exact zeros, nothing else changes."""
    empty = {"losses": torch.zeros(shape).double().requires_grad_(), "loss_mask": torch.ones(shape)}
    step = make_aggregator(per_token=per_token).begin_step([empty, make_microbatch([[3.0]], [[1]])])
    assert step.report(run_step(step))["loss"] == 3.0
    step.validate()
    assert empty["losses"].grad.shape == shape


def test_low_precision_losses_and_weights():
    """bfloat16 losses are summed in float32; bfloat16 weights pass the checksum."""
    losses = torch.ones(1, 3000, dtype=torch.bfloat16, requires_grad=True)
    microbatch = {"losses": losses, "loss_mask": torch.ones(1, 3000)}
    step = make_aggregator("token-sum", weight_dtype=torch.float32).begin_step([microbatch])
    assert step.report(run_step(step))["loss"] == 3000
    for weight_dtype in (torch.float32, torch.bfloat16):
        step = make_aggregator(weight_dtype=weight_dtype).begin_step(fixture_f(2))
        run_step(step)
        step.validate()


def test_known_counts_are_used_as_they_are():
    """counts= of a driver: this rank holds a part, so its value is a part of J."""
    counts = GlobalCounts(num_tokens=14, num_valid_seqs=6, num_seqs=8)
    step = make_aggregator().begin_step(fixture_f(1), counts=counts)
    microbatch = step.microbatches[0]
    loss, _ = step.loss_func(microbatch, microbatch["losses"])
    assert loss.item() == pytest.approx(20 / 14)
    assert int(step.counts.num_tokens) == 14 and not step.is_empty


@pytest.mark.parametrize("num_chunks", [0, -1])
def test_number_of_chunks(num_chunks):
    """At least one model chunk."""
    step = make_aggregator().begin_step(fixture_f(1))
    with pytest.raises(ValueError, match=f"num_chunks must be at least 1 .* got {num_chunks}"):
        step.data_iterator(num_chunks)


def test_rank_without_data():
    """An earlier stage: None iterators, no microbatches, no counts, and nobody to wait for."""
    groups = ParallelGroups(pp=FakeGroup(2, 0))
    step = make_aggregator(groups=groups).begin_step(None, num_microbatches=3)
    assert step.data_iterator(2) == [None, None] and step.microbatches == []
    step.validate()
    assert step.report([], broadcast_over_pipeline=False) == {}
    with pytest.raises(LossAggError, match=r"takes part in no count\. .* on every rank"):
        _ = step.counts
    with pytest.raises(LossAggError, match=r"not known yet .* call step\.report"):
        _ = step.is_empty


def test_rank_without_data_that_knows_the_counts():
    """counts= is not ignored there: it tells whether the batch is empty."""
    aggregator = make_aggregator(groups=ParallelGroups(pp=FakeGroup(2, 0)))
    step = aggregator.begin_step(None, num_microbatches=3, counts=GlobalCounts(0, 0, 4))
    assert step.is_empty and int(step.counts.num_seqs) == 4


def test_tensor_parallel_rank_gets_its_weights_by_broadcast(monkeypatch):
    """A last-stage rank without data computes the same loss from the weights that it receives."""
    # The other rank has the same numbers.
    monkeypatch.setattr("megatron_lossagg.step.checks.tp_problems", lambda *args: [])
    data_rank = make_aggregator(weights_key="loss_mask").begin_step(fixture_f(2))
    other = make_aggregator(
        weights_key="loss_mask", groups=ParallelGroups(tp=FakeGroup(2, 1))
    ).begin_step(None, num_microbatches=2)
    store = run_schedule(other.loss_func, iter(data_rank.microbatches), 2)
    other.validate()
    assert other.report(store)["loss"] == pytest.approx(20 / 7)
    assert not other.is_empty
