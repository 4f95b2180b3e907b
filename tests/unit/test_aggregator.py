"""LossAggregator: arguments, begin_step and every refusal that needs no schedule."""

from __future__ import annotations

import collections
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from one_process import (
    FakeGroup,
    fixture_f,
    make_aggregator,
    make_microbatch,
    model_config,
    run_step,
)

from megatron_lossagg import GlobalCounts, LossAggError, LossAggregator, ParallelGroups
from megatron_lossagg.modes import mode_names


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_agg_mode": "tokenmean"}, ValueError, "'tokenmean'; expected one of token-mean"),
        ({"loss_agg_mode": None}, ValueError, "needs loss_agg_mode, for example"),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm"},
            ValueError,
            "needs loss_scale_factor, .* width is no usable default",
        ),
        ({"loss_scale_factor": 0}, ValueError, "loss_scale_factor=0 cannot divide"),
        ({"loss_scale_factor": -2.0}, ValueError, "loss_scale_factor=-2.0 cannot divide"),
        ({"loss_scale_factor": float("nan")}, ValueError, "nan cannot divide"),
        ({"loss_scale_factor": float("inf")}, ValueError, "inf cannot divide"),
        ({"loss_scale_factor": True}, TypeError, "must be a number, got True of type bool"),
        ({"loss_scale_factor": "4"}, TypeError, "must be a number, got '4' of type str"),
        ({"norm_semantics": "max"}, ValueError, "norm_semantics='max' does not exist; .* 'sum'"),
        ({"sequence_count": 3}, ValueError, "sequence_count=3 does not .* 'valid' or 'nominal'"),
        ({"cp_gradient": "ring"}, ValueError, "cp_gradient='ring' .* replicated-value"),
        ({"returns": "three"}, ValueError, "returns='three' .* loss_and_num_tokens"),
        ({"weights_key": ""}, ValueError, "weights_key='' cannot name .* 'loss_mask' or a name"),
        ({"weights_key": "unit_ids"}, ValueError, "weights_key='unit_ids' cannot name"),
        ({"weight_dtype": torch.float16}, TypeError, r"weight_dtype .*, got torch\.float16"),
        ({"checks": "none"}, ValueError, "checks='none' does not exist; expected one of required"),
        ({"weight_dtype": 32}, TypeError, r"one of torch\.float32, .* got 32"),
        ({"weight_dtype": "float16"}, ValueError, "weight_dtype='float16' does not exist"),
        ({"mode": "token-mean"}, TypeError, "has no option mode; its options are loss_agg_mode, "),
        ({"loss_fn": None}, TypeError, r"needs a loss_fn, or terms=\[LossTerm"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be callable, got int"),
        ({"model_config": None}, TypeError, "TransformerConfig, got NoneType without calculate_"),
        ({"model_config": torch.nn.Linear(1, 1)}, TypeError, r"got Linear .* get_model_config"),
    ],
)
def test_wrong_arguments_fail_at_construction(options, error, message):
    """What was passed, what exists and what to do, before any step is planned."""
    with pytest.raises(error, match=message):
        make_aggregator(**{"loss_agg_mode": "token-mean", **options})


def test_unknown_mode_lists_all_modes():
    """Every known name is in the message."""
    with pytest.raises(ValueError) as caught:
        make_aggregator("dapo")
    assert all(name in str(caught.value) for name in mode_names())


@pytest.mark.parametrize(
    ("microbatches", "error", "message"),
    [
        (None, ValueError, "needs microbatches, or num_microbatches on a rank that has no data"),
        ([], ValueError, "got an empty list.* masks are all 0 .* passes None and num_microb"),
        ((m for m in fixture_f(1)), TypeError, "list of microbatches, got generator.*wrap"),
        (iter(fixture_f(1)), TypeError, "got list_iterator"),
        (fixture_f(1)[0], TypeError, "list of microbatches, got dict"),
        ("batch", TypeError, "list of microbatches, got str"),
        ([None], TypeError, "Microbatch 0 is a NoneType; expected a dict of tensors"),
        ([*fixture_f(1), (1, 2)], TypeError, "Microbatch 1 is a tuple"),
        (
            [{"tokens": 1, 2: 3}],
            ValueError,
            "Microbatch 0 has no 'loss_mask'; its keys are tokens, 2",
        ),
        ([{"loss_mask": None}], ValueError, "Microbatch 0 has no 'loss_mask'"),
        ([{"loss_mask": [[1, 0]]}], TypeError, "loss_mask must be a tensor, got list"),
        ([make_microbatch([1.0], [1])], ValueError, r"shape \[b, s\], .* got \(1,\)"),
        (
            [make_microbatch([[1.0]], [[2]])],
            ValueError,
            "only 0 and 1, got 1 other values such as 2",
        ),
        ([make_microbatch([[1.0]], [[0.5]])], ValueError, r"such as 0\.5\. Put per-token weights"),
        (
            [make_microbatch([[1.0]], [[1]], sample_mask=torch.ones(2))],
            ValueError,
            r"sample_mask must have shape \[b\] = \[1\], got \(2,\)",
        ),
        (
            [make_microbatch([[1.0]], [[1]], loss_weights=torch.ones(1, 1))],
            ValueError,
            "Microbatch 0 already has a field 'loss_weights'.*another weights_key",
        ),
        (
            [make_microbatch([[1.0]], [[1]], cu_seqlens=torch.tensor([0, 2]))],
            ValueError,
            "cu_seqlens must rise from 0 to at most the mask's width 1",
        ),
    ],
)
def test_microbatches_that_cannot_be_planned(microbatches, error, message):
    """Which microbatch, what it is and what it should be."""
    with pytest.raises(error, match=message):
        make_aggregator().begin_step(microbatches)


def test_fields_that_are_none_are_absent():
    """A loader that fills unused fields with None is not refused."""
    fields = {"cu_seqlens": None, "unit_ids": None, "sample_mask": None}
    step = make_aggregator().begin_step([make_microbatch([[2.0]], [[1]], **fields)])
    assert step.report(run_step(step))["loss"] == 2.0


@pytest.mark.parametrize("sequence", [list, tuple, collections.deque])
def test_sequences_of_mappings_are_microbatches(sequence):
    """Any sequence and any mapping will do; an ordinary dict comes out."""
    microbatches = sequence(collections.UserDict(m) for m in fixture_f(2))
    step = make_aggregator().begin_step(microbatches)
    assert step.report(run_step(step))["loss"] == pytest.approx(20 / 7)
    assert type(step.microbatches[0]) is dict


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, lambda n: lambda: n])
def test_number_of_microbatches_of_a_rank_without_data(kind):
    """An int, numpy's int or a function such as get_num_microbatches."""
    aggregator = make_aggregator(groups=ParallelGroups(pp=FakeGroup(2, 0)))
    step = aggregator.begin_step(None, num_microbatches=kind(3))
    assert step.num_microbatches == 3 and type(step.num_microbatches) is int


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, ValueError, "num_microbatches must be at least 1, got 0"),
        (-1, ValueError, "at least 1, got -1"),
        (2.0, TypeError, r"num_microbatches must be an int .* got 2\.0"),
        ("4", TypeError, "got '4'"),
        (True, TypeError, "got True"),
        (lambda: None, TypeError, "got None"),
    ],
)
def test_wrong_number_of_microbatches(number, error, message):
    """begin_step and wrap check it alike."""
    aggregator = make_aggregator(groups=ParallelGroups(pp=FakeGroup(2, 0)))
    with pytest.raises(error, match=message):
        aggregator.begin_step(None, num_microbatches=number)
    with pytest.raises(error, match=message):
        next(aggregator.wrap(iter(fixture_f(1)), num_microbatches=number))


def test_number_of_microbatches_that_contradicts_the_list():
    """Both numbers are named."""
    with pytest.raises(ValueError, match="got 2 microbatches but num_microbatches=3; leave"):
        make_aggregator().begin_step(fixture_f(2), num_microbatches=3)
    assert make_aggregator().begin_step(fixture_f(2), num_microbatches=2).num_microbatches == 2


def test_no_microbatches_where_the_loss_is_computed():
    """None on the last stage would leave its tokens uncounted."""
    with pytest.raises(LossAggError, match="no microbatches on a rank of the last pipeline stage"):
        make_aggregator().begin_step(None, num_microbatches=2)


@pytest.mark.parametrize("counts", [7, {"num_tokens": 7}, torch.tensor(7)])
def test_counts_of_another_type(counts):
    """Known counts come as GlobalCounts."""
    with pytest.raises(
        TypeError, match="counts must be a GlobalCounts, or a mapping from mask_key to one, got"
    ):
        make_aggregator().begin_step(fixture_f(1), counts=counts)


def test_floating_point_counts():
    """A mean or a float sum is no count."""
    with pytest.raises(
        TypeError, match=r"num_tokens must be an integer tensor, got torch\.float32"
    ):
        GlobalCounts(num_tokens=torch.ones(3).sum(), num_valid_seqs=1, num_seqs=1)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda out, mb: out.sum(), ValueError, r"shape \(\), but .* looks reduced already"),
        (lambda out, mb: out.mean(dim=1), ValueError, "looks reduced already: return the loss of"),
        (lambda out, mb: out[:, 1:], ValueError, r"shape \(2, 1\), but .* \(2, 2\)"),
        (lambda out, mb: out[:1], ValueError, r"shape \(1, 2\)"),
        (lambda out, mb: None, TypeError, "tensor of per-token losses, got NoneType"),
        (lambda out, mb: (out, out, out), TypeError, "tensor of per-token losses, got tuple"),
        (lambda out, mb: mb["loss_mask"], TypeError, r"floating-point losses, got torch\.int64"),
    ],
)
def test_loss_fn_that_returns_something_else(loss_fn, error, message):
    """The loss is per token, floating point and of the mask's shape."""
    step = make_aggregator(loss_fn=loss_fn).begin_step(
        [make_microbatch([[1.0, 2.0], [3.0, 4.0]], [[1, 1], [1, 0]])]
    )
    microbatch = step.microbatches[0]
    with pytest.raises(error, match=message):
        step.loss_func(microbatch, microbatch["losses"])


def test_loss_fn_gets_the_microbatch_and_may_keep_it():
    """It sees all fields, its own output tensor, and cannot reach the caller's dict."""
    seen = []

    def loss_fn(output_tensor, microbatch):
        seen.append(sorted(microbatch))
        return output_tensor * microbatch.pop("advantages")

    microbatch = make_microbatch([[1.0, 2.0]], [[1, 1]], advantages=torch.tensor([[3.0, 5.0]]))
    step = make_aggregator("token-sum", loss_fn=loss_fn).begin_step([microbatch])
    assert step.report(run_step(step))["loss"] == 13.0
    assert seen == [["advantages", "loss_mask", "loss_weights", "losses"]]
    assert "advantages" in microbatch


def test_microbatch_and_output_swapped():
    """The order of loss_func is (microbatch, output_tensor), as partial() binds it."""
    step = make_aggregator().begin_step(fixture_f(1))
    microbatch = step.microbatches[0]
    with pytest.raises(LossAggError, match=r"carries no weights .*\(found: Tensor\)"):
        step.loss_func(microbatch["losses"], microbatch)


def test_raw_microbatch_is_not_planned():
    """loss_func on the caller's dict instead of what the iterator yields."""
    microbatches = fixture_f(1)
    step = make_aggregator().begin_step(microbatches)
    with pytest.raises(
        LossAggError, match=r"no weights under 'loss_weights' \(found: losses, loss_"
    ):
        step.loss_func(microbatches[0], microbatches[0]["losses"])
    step = make_aggregator(weights_key="loss_mask").begin_step(microbatches)
    with pytest.raises(TypeError, match=r"'loss_mask' given to loss_func is torch\.int64"):
        step.loss_func(microbatches[0], microbatches[0]["losses"])


def test_step_that_was_never_planned():
    """aggregator.loss_func without wrap, also after a begin_step, which it does not belong to."""
    aggregator = make_aggregator()
    for _ in range(2):
        with pytest.raises(LossAggError, match=r"no step was planned .* aggregator\.wrap\("):
            aggregator.loss_func({"loss_weights": torch.ones(1, 1)}, torch.ones(1, 1))
        aggregator.begin_step(fixture_f(1))


@pytest.mark.parametrize("planning", ["begin_step", "wrap"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model_config": model_config(True, num_moe_experts=2), "returns": "loss"},
            "returns='loss' with",
        ),
        ({"model_config": model_config(hybrid_context_parallel=True)}, "hybrid_context_parallel"),
        (
            {"model_config": model_config(True, mtp_num_layers=1), "returns": "loss"},
            "mtp_num_layers set",
        ),
        (
            {"groups": ParallelGroups(pp=FakeGroup(2, 1), num_virtual_stages=2)},
            "overlap_p2p_comm=True and batch_p2p_comm=False",
        ),
    ],
)
def test_setups_that_are_refused_when_a_step_begins(options, message, planning):
    """Each refusal of the contract reaches the user of both ways to plan."""
    aggregator = make_aggregator(**options)
    with pytest.raises(LossAggError, match=message):
        if planning == "begin_step":
            aggregator.begin_step(fixture_f(1))
        else:
            next(aggregator.wrap(iter(fixture_f(1)), num_microbatches=1))


def test_regime_is_read_at_every_step():
    """Public report 6: a bridge turns the flag on after the aggregator was built."""
    config = model_config(False)
    aggregator = make_aggregator(model_config=config)
    step = aggregator.begin_step(fixture_f(1))
    assert len(step.loss_func(step.microbatches[0], step.microbatches[0]["losses"])) == 2
    config.calculate_per_token_loss = True
    step = aggregator.begin_step(fixture_f(1))
    assert len(step.loss_func(step.microbatches[0], step.microbatches[0]["losses"])) == 3


@pytest.fixture
def megatron(monkeypatch):
    """A stand-in for megatron.core.parallel_state with groups of this process alone."""
    parallel_state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda with_context_parallel: None,
        get_context_parallel_group=lambda: None,
        get_pipeline_model_parallel_group=lambda: FakeGroup(1),
        get_tensor_model_parallel_group=lambda: FakeGroup(1),
        get_tensor_and_data_parallel_group=lambda with_context_parallel: None,
        get_virtual_pipeline_model_parallel_world_size=lambda: None,
    )
    core = SimpleNamespace(parallel_state=parallel_state)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    return parallel_state


def test_groups_are_needed(megatron):
    """Without Megatron's parallel state the message offers single_process()."""
    megatron.model_parallel_is_initialized = lambda: False
    aggregator = LossAggregator(
        lambda out, mb: out, loss_agg_mode="token-mean", model_config=model_config()
    )
    with pytest.raises(
        LossAggError, match=r"not initialised\..*groups=ParallelGroups\.single_process"
    ):
        aggregator.begin_step(fixture_f(1))


def test_groups_are_read_at_every_step(megatron):
    """groups=None follows a parallel state that was initialised anew."""
    aggregator = LossAggregator(
        lambda out, mb: out,
        loss_agg_mode="token-mean",
        model_config=model_config(mtp_num_layers=None),
    )
    aggregator.begin_step(fixture_f(1))
    megatron.get_pipeline_model_parallel_group = lambda: FakeGroup(2, 0)
    assert aggregator.begin_step(None, num_microbatches=2).microbatches == []
    megatron.get_virtual_pipeline_model_parallel_world_size = lambda: 2
    with pytest.raises(LossAggError, match="Pipeline size 2 with virtual stages"):
        aggregator.begin_step(None, num_microbatches=2)


def test_collection_that_lacks_groups(megatron):
    """A missing group is never passed on: None would mean the whole world."""
    collection = SimpleNamespace(dp=FakeGroup(1), pp=FakeGroup(1), tp=None)
    with pytest.raises(LossAggError, match="pg_collection lacks cp, dp_cp, tp; the loss needs dp,"):
        ParallelGroups.from_megatron(collection)
