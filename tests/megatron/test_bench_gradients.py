"""The bench itself is right: a hand-scaled loss has the reference's gradient under every layout.

No part of the plugin takes part. If these fail, no other Megatron test means anything.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from megatron_lossagg.testing import (
    Layout,
    RankFailure,
    SumLossPlan,
    TinyGPT,
    build_model_chunks,
    ragged_batch,
    reference_run,
    relative_error,
    run_global_batch,
    token_log_probs,
    whole_model_parameters,
)
from megatron_lossagg.testing.model.model_chunks import initialize_by_name
from megatron_lossagg.testing.model.parameter_names import named_parameters

# Sums of some thousand float64 terms in another order.
_TOLERANCE = 1e-12
_DENOMINATOR = 7.0
LONG = pytest.mark.conformance
_PLAN = SumLossPlan(_DENOMINATOR, weights_key="weights")

# Layouts of one world size together: changing it makes all groups anew.
_LAYOUTS = [
    "D=1 M=1",
    "TP=2 M=2",
    "TP=2 SP=1 M=2",
    "PP=2 VPP=2 M=4",
    "PP=2 VPP=2 M=3",
    "D=4 M=4",
    "TP=2 PP=2 M=4",
    "PP=2 D=2 M=4",
    "PP=4 M=4",
    "C=2 D=2 M=2",
    "C=4 M=2",
    "PP=2 C=2 M=2",
    "PP=2 VPP=2 C=2 M=4",
    "TP=2 C=2 SP=1 M=2",
]


def _batch(num_rows: int = 16, dp: int = 4, num_microbatches: int = 4):
    return ragged_batch(
        num_rows, dp=dp, num_microbatches=num_microbatches, extra_fields=("weights",)
    )


def _weighted_losses(logits, rows):
    return -token_log_probs(logits, rows["labels"]) * rows["weights"] / _DENOMINATOR


def _reference(rank_pool, gpt, batch):
    return rank_pool.run(reference_run, gpt, batch, _weighted_losses, "token-sum")[0]


@pytest.fixture(scope="module")
def references(rank_pool):
    gpts = {
        "default": TinyGPT(),
        "float32": TinyGPT(dtype=torch.float32),
        "shared embeddings": TinyGPT(share_embeddings=True),
    }
    found = {name: _reference(rank_pool, gpt, _batch()) for name, gpt in gpts.items()}
    found["12 rows"] = _reference(rank_pool, TinyGPT(), _batch(12, 1, 3))
    return found


def _run(rank_pool, text, batch=None, plan=_PLAN, **kwargs):
    layout = Layout.parse(text)
    batch = _batch() if batch is None else batch
    if (batch.dp_size, batch.num_microbatches) != (layout.dp, layout.num_microbatches):
        batch = batch.split(layout.dp, layout.num_microbatches)
    return rank_pool.run(
        run_global_batch, batch, layout, plan, world_size=layout.world_size, **kwargs
    )


def _check(results, reference, tolerance=_TOLERANCE):
    loss, gradient = reference
    assert relative_error(results[0].gradients, gradient) <= tolerance
    for result in results:
        assert result.report == pytest.approx(loss, rel=tolerance)
    assert all(result.gradients is None for result in results[1:])


@pytest.mark.parametrize("text", _LAYOUTS)
def test_gradient_does_not_depend_on_the_layout(rank_pool, references, text):
    """Whole-model gradient and loss in float64, against one process that sees the full batch."""
    if text == "PP=2 VPP=2 M=3":  # a group of microbatches with a remainder
        _check(_run(rank_pool, text, _batch(12, 1, 3)), references["12 rows"])
    else:
        _check(_run(rank_pool, text), references["default"])


@pytest.mark.parametrize("text", ["PP=2 D=2 M=2", "TP=2 PP=2 M=2", "PP=2 VPP=2 D=2 M=2"])
def test_shared_embeddings(rank_pool, references, text):
    """First and last stage hold one weight; its gradient is the sum of both uses."""
    gpt = TinyGPT(share_embeddings=True)
    _check(_run(rank_pool, text, gpt=gpt), references["shared embeddings"])


@pytest.mark.parametrize("text", ["D=4 M=2", "PP=2 C=2 M=2", "TP=2 PP=2 M=2"])
def test_float32(rank_pool, references, text):
    """As float64, to float32's accuracy; same float32 weights."""
    results = _run(rank_pool, text, gpt=TinyGPT(dtype=torch.float32))
    assert all(g.dtype == torch.float32 for g in results[0].gradients.values())
    _check(results, references["float32"], 1e-5)


@pytest.mark.parametrize("text", ["D=4 M=2", "PP=2 D=2 M=4", "PP=2 VPP=2 D=2 M=2", "C=2 D=2 M=2"])
def test_distributed_optimizer_and_overlap(rank_pool, references, text):
    """With gradients in shards and reductions under way during backward, the sum is the same."""
    flags = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    _check(_run(rank_pool, text, **flags), references["default"])


@pytest.mark.parametrize("text", ["D=2 M=2", "PP=2 D=2 M=2"])
def test_uneven_microbatch_sizes(rank_pool, text):
    """Rank 0 has 2 rows a microbatch and rank 1 has 1."""
    batch = ragged_batch(6, assignment=[[[0, 1], [2, 3]], [[4], [5]]], extra_fields=("weights",))
    _check(_run(rank_pool, text, batch), _reference(rank_pool, TinyGPT(), batch))


@pytest.mark.parametrize(
    "text", ["PP=2 D=2 M=2", "EP=2 C=2 M=2", pytest.param("TP=4 SP=1 EP=2 M=2", marks=LONG)]
)
def test_moe_layers(rank_pool, text):
    """Real MoE layers, top-2 of 4 experts, without an auxiliary loss."""
    gpt = _moe_gpt()
    _check(_run(rank_pool, text, gpt=gpt), _reference(rank_pool, gpt, _batch()))


def _moe_gpt():
    overrides = {"num_moe_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 32}
    overrides |= {"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp64"}
    return TinyGPT(num_layers=2, overrides=overrides)


def test_repeated_runs_give_equal_bits(rank_pool):
    """A kept model starts from zero gradients, also after runs of other kinds."""
    first = _run(rank_pool, "PP=2 D=2 M=4")[0].gradients
    _run(rank_pool, "PP=2 D=2 M=4", forward_only=True)
    _run(rank_pool, "PP=2 D=2 M=2")
    again = _run(rank_pool, "PP=2 D=2 M=4")[0].gradients
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_forward_only(rank_pool, references):
    """The same loss, no gradients; with collect_non_loss_data, what loss_func gives for it."""
    results = _run(rank_pool, "PP=2 VPP=2 D=2 M=2", forward_only=True)
    assert all(result.gradients is None for result in results)
    assert results[0].report == pytest.approx(references["default"][0], rel=_TOLERANCE)
    stores = [len(result.forward_data_store) for result in results]
    assert stores == [0, 0, 2, 2]


class _ShapesPlan(SumLossPlan):
    def _finish(self, forward_data_store):
        return [tuple(data.shape) for data in forward_data_store]


def test_collect_non_loss_data(rank_pool):
    """loss_func gets non_loss_data=True, and its result is stored as it is."""
    results = _run(
        rank_pool,
        "PP=2 D=2 M=2",
        plan=_ShapesPlan(1.0),
        forward_only=True,
        collect_non_loss_data=True,
    )
    assert [result.report for result in results] == [[], [], [(4, 16)] * 2, [(4, 16)] * 2]


def _parameters(gpt, layout):
    return whole_model_parameters(build_model_chunks(gpt, layout, wrap_with_ddp=False))


def test_weights_do_not_depend_on_the_layout(rank_pool):
    """Equal bits, whatever is split; a seed changes them."""
    gpt = TinyGPT(share_embeddings=True)
    expected = rank_pool.run(_parameters, gpt, Layout(dp=4))[0]
    for text in ("TP=2 PP=2", "PP=4", "PP=2 VPP=2 D=2 M=2", "TP=4 SP=1"):
        for got in rank_pool.run(_parameters, gpt, Layout.parse(text)):
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], expected[name]) for name in expected), text
    other = rank_pool.run(_parameters, TinyGPT(seed=1, share_embeddings=True), Layout(dp=4))[0]
    assert all(not torch.equal(other[name], expected[name]) for name in expected)


def test_names_count_layers_over_stages(rank_pool):
    """A parameter has the name that it has in the model in one piece."""
    names = rank_pool.run(_names, Layout.parse("PP=2 VPP=2 D=2 M=2"))
    layers = [sorted({int(n.split(".")[2]) for n in ns if "layers" in n}) for ns in names]
    assert layers == [[0, 2], [0, 2], [1, 3], [1, 3]]


def _names(layout):
    return [
        n for chunk in build_model_chunks(TinyGPT(), layout) for n, _ in named_parameters(chunk)
    ]


def _disagreeing_parameters(layout):
    chunks = build_model_chunks(TinyGPT(), layout, wrap_with_ddp=False)
    if torch.distributed.get_rank() == 3:
        initialize_by_name(chunks[0], TinyGPT(seed=9))
    return whole_model_parameters(chunks)


def test_replicas_that_differ_are_reported(rank_pool):
    """The message names a parameter, two ranks and the size of the difference."""
    with pytest.raises(RankFailure, match=r"the value of \S+ differs .* on ranks 0 and 3 by up to"):
        rank_pool.run(_disagreeing_parameters, Layout(dp=4))


def _a_disagreeing_expert(layout):
    chunks = build_model_chunks(_moe_gpt(), layout, wrap_with_ddp=False)
    if torch.distributed.get_rank() == 3:
        with torch.no_grad():
            chunks[0].decoder.layers[1].mlp.experts.local_experts[0].linear_fc1.weight.add_(1)
    return whole_model_parameters(chunks)


def test_replicas_of_an_expert_that_differ_are_reported(rank_pool):
    """Ranks 1 and 3 of four hold experts 2 and 3."""
    name = r"decoder\.layers\.1\.mlp\.experts\.local_experts\.2\.linear_fc1\.weight"
    with pytest.raises(RankFailure, match=f"the value of {name} differs .* on ranks 1 and 3"):
        rank_pool.run(_a_disagreeing_expert, Layout.parse("EP=2 D=4"))


class _NaNPlan(SumLossPlan):
    def _loss(self, factor, microbatch, logits, non_loss_data=False):
        return (logits * math.nan).sum(), torch.zeros(())


def test_nan_gradients_are_returned_not_hidden(rank_pool):
    """NaN replicas agree with each other, and no comparison accepts them."""
    results = _run(rank_pool, "PP=2 D=2 M=2", plan=_NaNPlan(1.0))
    assert math.isnan(relative_error(results[0].gradients, results[0].gradients))


class _WrongFactorPlan(SumLossPlan):
    def __call__(self, context):
        plan = super().__call__(context)
        factor = context.layout.num_microbatches / self.denominator
        return type(plan)(
            partial(self._forward_step, factor), plan.data_iterator, plan.num_microbatches
        )


def test_a_wrong_factor_shows(rank_pool, references):
    """A loss that forgets D: the bench must not accept it."""
    results = _run(rank_pool, "D=4 M=2", plan=_WrongFactorPlan(_DENOMINATOR, "weights"))
    assert relative_error(results[0].gradients, references["default"][1]) == pytest.approx(0.75)


def test_misfits_are_explained(rank_pool):
    """Batch, layout and model that don't fit: what was given and what to do."""
    for text, batch, gpt, match in (
        ("D=2 M=2", _batch(), TinyGPT(), r"the batch is assigned to D=4 M=4, but .* 'D=2 M=2'"),
        ("C=4 M=1", ragged_batch(1, width=12), TinyGPT(), r"multiple of 8 .* got \[12\]"),
        ("EP=2 D=2 M=1", ragged_batch(2, dp=2), TinyGPT(), "num_moe_experts .* of EP = 2, got 1"),
        ("PP=4 M=1", ragged_batch(1), TinyGPT(num_layers=2), r"multiple of PP \* VPP = 4, got 2"),
    ):
        layout = Layout.parse(text)
        with pytest.raises(RankFailure, match=match):
            rank_pool.run(
                run_global_batch, batch, layout, _PLAN, gpt=gpt, world_size=layout.world_size
            )
    with pytest.raises(RankFailure, match="needs 2 ranks .* but there are 4"):
        rank_pool.run(run_global_batch, _batch(4, 2, 2), Layout.parse("D=2 M=2"), _PLAN)
