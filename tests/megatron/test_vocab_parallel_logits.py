"""Log-probs and entropy from vocab-parallel logits, against plain torch on the gathered logits."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron_lossagg import (
    LossAggError,
    ParallelGroups,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
)
from megatron_lossagg.log_probs.shard import BACKWARDS
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.ranks.parallel import (
    destroy_model_parallel,
    initialize_model_parallel,
)
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan
from megatron_lossagg.verification.case_runs import case_on_rank
from megatron_lossagg.verification.cases import GRADIENT_BOUNDS, Case, standard_batch
from megatron_lossagg.verification.references import references_on_rank

VOCAB = 22
SHAPES = {"rows": (3, 7), "packed": (1, 21)}


def make_inputs(shape, dtype):
    """Logits around 30, some of -inf (whole parts of the vocabulary, too), labels, a ragged mask.

    Also gradients that come from a loss, different for every token.
    """
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64) + 30
    labels = torch.randint(VOCAB, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.7
    grads = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    flat, flat_labels = logits.view(-1, VOCAB), labels.view(-1)
    flat[3, :5], flat[4, : VOCAB // 2], flat[5, VOCAB // 2 :] = (-torch.inf,) * 3
    flat_labels[3:6] = torch.tensor([7, VOCAB - 1, 0])
    mask.view(-1)[3:6] = True
    return logits.to(dtype), labels, mask, grads


def naive(logits, labels, mask, grads, temperature, dtype=torch.float64):
    """(log_probs, entropy, gradient), whole vocabulary, torch's own functions and autograd."""
    logits = logits.clone().requires_grad_()
    log_p = (logits.to(dtype) / temperature).log_softmax(dim=-1)
    log_probs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).where(mask, 0)
    finite = log_p.where(log_p > -torch.inf, 0)
    entropy = -(finite.exp() * finite).where(log_p > -torch.inf, 0).sum(-1).where(mask, 0)
    ((log_probs * grads[0]).sum() + (entropy * grads[1]).sum()).backward()
    return log_probs.detach(), entropy.detach(), logits.grad


def run_on_rank(shape, dtype, options):
    """What this rank's part of the logits gives, the gradient of the part included."""
    size = torch.distributed.get_world_size()
    initialize_model_parallel(Layout(tp=size))
    logits, labels, mask, grads = make_inputs(shape, dtype)
    part = logits.chunk(size, dim=-1)[torch.distributed.get_rank()].clone().requires_grad_()
    # A factor of 1 makes it an inner tensor, as a model's output is.
    inner = part * 1
    before = inner.detach().clone()
    log_probs, entropy = log_probs_and_entropy_from_logits(inner, labels, mask, **options)
    assert inner.equal(before), "the forward pass has changed the logits"
    torch.autograd.backward((log_probs, entropy), (grads[0], grads[1]))
    assert inner.equal(before) or options.get("backward") == "overwrite-logits"
    alone = log_probs_from_logits(part, labels, mask, **options)
    assert alone.equal(log_probs)
    [gradient] = torch.autograd.grad(alone, part, grads[0])
    return log_probs.detach(), entropy.detach(), part.grad, gradient


def results(rank_pool, shape, dtype, tp, **options):
    """(log_probs, entropy, gradient of both, gradient of log_probs alone), of the whole."""
    ranks = rank_pool.run(run_on_rank, shape, dtype, options, world_size=tp)
    for rank in ranks[1:]:
        assert rank[0].equal(ranks[0][0]) and rank[1].equal(ranks[0][1])
    return *ranks[0][:2], *(torch.cat([rank[i] for rank in ranks], dim=-1) for i in (2, 3))


def largest_error(got, expected):
    """As an absolute number."""
    return float((got.double() - expected.double()).abs().max())


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("chunk_size", "temperature"),
    [(5, 0.7)] + [pytest.param(size, 1.0, marks=pytest.mark.conformance) for size in (21, None)],
)
def test_exact_in_float64(rank_pool, shape, tp, backward, chunk_size, temperature):
    """Values and gradients to 1e-12, parts of nothing but -inf included, for any chunks."""
    options = {"backward": backward, "chunk_size": chunk_size, "temperature": temperature}
    got = results(rank_pool, shape, torch.float64, tp, **options)
    logits, labels, mask, grads = make_inputs(shape, torch.float64)
    expected = naive(logits, labels, mask, grads, temperature)
    without_entropy = torch.stack([grads[0], torch.zeros_like(grads[1])])
    expected += naive(logits, labels, mask, without_entropy, temperature)[2:]
    for one, other in zip(got, expected, strict=True):
        assert largest_error(one, other) <= 1e-12
    assert (got[2] != 0).sum() > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_no_less_accurate_than_plain_float32(rank_pool, dtype, backward):
    """Errors against float64 of the same logits: at most twice those of plain float32 ops.

    Of float32 logits: the largest error of each; a bfloat16 gradient has its last rounding on top.
    """
    got = results(rank_pool, (3, 7), dtype, 2, backward=backward, chunk_size=4)
    logits, labels, mask, grads = make_inputs((3, 7), dtype)
    exact = naive(logits.double(), labels, mask, grads, 1.0)
    plain = naive(logits, labels, mask, grads.float(), 1.0, torch.float32)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert got[2].dtype == dtype
    for one, other, expected in zip(got, plain, exact, strict=False):
        assert largest_error(one, expected) <= 2 * largest_error(other, expected)


def _megatrons_on_rank(shape):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    initialize_model_parallel(Layout(tp=2))
    logits, labels, _, grads = make_inputs(shape, torch.float32)
    found = []
    for function in (lambda x, y: -vocab_parallel_cross_entropy(x, y), log_probs_from_logits):
        part = logits.chunk(2, dim=-1)[torch.distributed.get_rank()].clone().requires_grad_()
        log_probs = function(part * 1, labels)
        log_probs.backward(grads[0].float())
        found.append((log_probs.detach(), part.grad))
    return found


def test_agrees_with_megatrons_own_function(rank_pool):
    """Log-probs and gradient, float32, TP=2: to 4 units in the last place of what is subtracted."""
    for (own, own_gradient), (log_probs, gradient) in rank_pool.run(
        _megatrons_on_rank, (3, 7), world_size=2
    ):
        assert largest_error(log_probs, own) <= 4 * 2**-23 * 32
        assert largest_error(gradient, own_gradient) <= 1e-5


def _without_groups_on_rank():
    destroy_model_parallel()
    logits, labels, *_ = make_inputs((3, 7), torch.float32)
    with pytest.raises(LossAggError, match="initialize_model_parallel"):
        log_probs_from_logits(logits, labels)
    alone = torch.distributed.new_group([0])
    return log_probs_from_logits(logits, labels, tp_group=alone)


def test_no_group_is_guessed(rank_pool):
    """Among several processes without Megatron's groups `tp_group` must be passed."""
    [log_probs] = rank_pool.run(_without_groups_on_rank, world_size=1)
    assert log_probs.shape == (3, 7)


def plugin_losses(logits, microbatch):
    """A policy gradient with an entropy bonus, at the temperature 0.8."""
    log_probs, entropy = log_probs_and_entropy_from_logits(
        logits,
        microbatch["labels"],
        microbatch["loss_mask"],
        tp_group=ParallelGroups.from_megatron().tp,
        temperature=0.8,
        chunk_size=5,
    )
    ratio = (log_probs - microbatch["old_log_probs"]).exp()
    return -microbatch["advantages"] * ratio - 0.1 * entropy


def naive_losses(logits, rows):
    """The same of whole logits."""
    log_p = (logits / 0.8).log_softmax(dim=-1)
    log_probs = log_p.gather(-1, rows["labels"].unsqueeze(-1)).squeeze(-1)
    ratio = (log_probs - rows["old_log_probs"]).exp()
    return -rows["advantages"] * ratio + 0.1 * (log_p.exp() * log_p).sum(dim=-1)


DEFAULT = ("TP=2 PP=2 M=4", "R1")
LAYOUTS = ("TP=2 PP=2 M=4", "TP=2 D=2 M=2", "TP=2 C=2 M=2", "TP=4 M=2", "D=1 M=1")


@pytest.mark.parametrize(
    ("text", "regime"),
    [
        pytest.param(*case, marks=() if case == DEFAULT else pytest.mark.conformance)
        for case in product(LAYOUTS, ("R1", "R3"))
    ],
)
def test_whole_model_gradient(rank_pool, text, regime):
    """Through a real GPT, its schedule and DDP: gradient <= 1e-12 (R3: 1e-6), loss <= 1e-12."""
    layout = Layout.parse(text)
    batch, gpt = standard_batch(layout), TinyGPT()
    plans = [AggregatorPlan("token-mean", token_losses=plugin_losses)]
    [references] = rank_pool.run(references_on_rank, gpt, batch, plans, naive_losses, world_size=1)
    ranks = rank_pool.run(
        case_on_rank,
        gpt,
        batch,
        Case(layout, regime, "begin_step"),
        plans,
        world_size=layout.world_size,
    )
    [(loss, gradients)] = references
    assert relative_error(ranks[0][0][0], gradients) <= GRADIENT_BOUNDS[regime]
    for rank in ranks:
        if "loss" in rank[0][1]:
            assert abs(rank[0][1]["loss"] - loss) <= 1e-12 * abs(loss)
