"""Log-probs and entropy from logits in one process: masks, views, memory, messages.

Their values and gradients, and tensor parallelism, are in tests/megatron/test_from_logits.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from one_process import FakeGroup

import megatron_lossagg
from megatron_lossagg.log_probs.shard import BACKWARDS
from megatron_lossagg.testing.memory import peak_memory

log_probs_from_logits = partial(megatron_lossagg.log_probs_from_logits, tp_group=FakeGroup(1))
log_probs_and_entropy_from_logits = partial(
    megatron_lossagg.log_probs_and_entropy_from_logits, tp_group=FakeGroup(1)
)
BOTH = pytest.mark.parametrize(
    "function",
    [log_probs_from_logits, log_probs_and_entropy_from_logits],
    ids=["log_probs", "log_probs_and_entropy"],
)
VOCAB = 11


def make_inputs():
    """Logits [3, 7, VOCAB], labels, a mask of bool, gradients of two outputs; all float64."""
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(3, 7, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (3, 7), generator=generator)
    mask = torch.rand((3, 7), generator=generator) < 0.7
    grads = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    return logits, labels, mask, grads


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@BOTH
@pytest.mark.parametrize("backward", BACKWARDS)
def test_what_is_masked_reaches_nothing(function, backward):
    """NaN and inf logits and labels of -100 at masked positions: the same bits, gradient 0."""
    logits, labels, mask, grads = make_inputs()
    outcomes = []
    for value, label in ((0, 0), (torch.nan, -100), (torch.inf, VOCAB + 3)):
        x = logits.masked_fill(~mask.unsqueeze(-1), value).requires_grad_()
        y = labels.masked_fill(~mask, label)
        outputs = as_tuple(function(x * 1, y, mask.float(), backward=backward, chunk_size=4))
        torch.autograd.backward(outputs, list(grads[: len(outputs)]))
        assert all((output[~mask] == 0).all() for output in outputs)
        assert (x.grad[~mask] == 0).all() and (x.grad[mask] != 0).any()
        outcomes.append((*outputs, x.grad))
    for outcome in outcomes[1:]:
        assert all(a.equal(b) for a, b in zip(outcomes[0], outcome, strict=True))


def test_nan_at_a_valid_position_shows():
    """In its own token's results and gradient, and in no other's."""
    logits, labels, mask, _ = make_inputs()
    mask[:] = True
    logits[1, 2, 3] = torch.nan
    x = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy_from_logits(x, labels, mask, chunk_size=4)
    (log_probs + entropy).sum().backward()
    expected = torch.zeros_like(mask)
    expected[1, 2] = True
    for found in (log_probs, entropy, x.grad.sum(-1)):
        assert found.isnan().equal(expected)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("view", [lambda x: x[:, :-1], lambda x: x.transpose(0, 1)])
@BOTH
def test_rows_that_cannot_be_joined(function, view, backward):
    """A slice and a transpose give the same as their copies, and the gradients arrive."""
    logits, labels, mask, grads = make_inputs()
    found = []
    for prepare in (view, lambda x: view(x).contiguous()):
        x = logits.clone().requires_grad_()
        part = prepare(x * 1)
        outputs = as_tuple(function(part, view(labels), view(mask), backward=backward))
        torch.autograd.backward(outputs, [view(grad) for grad in grads[: len(outputs)]])
        found.append((*outputs, x.grad))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert (found[0][-1] != 0).any()


def test_overwritten_logits_are_noticed():
    """Whoever needs the logits after their gradient has overwritten them gets autograd's error."""
    logits, labels, mask, _ = make_inputs()
    x = logits.requires_grad_() * 1
    other = (x * x).sum()
    log_probs = log_probs_from_logits(x, labels, mask, backward="overwrite-logits")
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_kept_softmax_is_used_once():
    """A second backward pass gets autograd's error, no gradient of a gradient."""
    logits, labels, mask, _ = make_inputs()
    log_probs = log_probs_from_logits(
        logits.requires_grad_(), labels, mask, backward="keep-softmax"
    )
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backward", "of_gradient"), [("recompute", 1), ("keep-softmax", 1), ("overwrite-logits", 0)]
)
def test_memory(function, dtype, backward, of_gradient):
    """Beyond the logits and their gradient never more than a tenth of the logits.

    Every allocation counts, those within an operator included. Until the backward pass not even the
    gradient is there, unless the softmax waits in its memory.
    """
    inner = torch.randn(1, 512, 4096).to(dtype).requires_grad_() * 1
    labels, mask = torch.randint(4096, (1, 512)), torch.rand(1, 512) < 0.9
    function = partial(function, backward=backward, chunk_size=8)
    size = inner.numel() * inner.element_size()
    with peak_memory() as forward:
        outputs = as_tuple(function(inner, labels, mask))
    del outputs
    with peak_memory() as whole:
        outputs = as_tuple(function(inner, labels, mask))
        torch.autograd.grad(outputs, inner, [torch.ones_like(output) for output in outputs])
    is_kept = backward == "keep-softmax" and dtype == torch.float32
    assert is_kept <= forward.num_bytes / size <= is_kept + 0.1
    assert of_gradient <= whole.num_bytes / size <= of_gradient + 0.1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocab"), [(8192, 32768), (131072, 32768), (4096, 151936)])
def test_default_chunks_are_small(tokens, vocab, dtype, device):
    """Two float32 chunks take at most a tenth of the logits; on the CPU one takes 4 to 5 MB."""
    from megatron_lossagg.log_probs.shard import LogitsShard

    logits = torch.empty(1, 1, 1, dtype=dtype, device=device).expand(1, tokens, vocab)
    shard = LogitsShard.of(logits, FakeGroup(1), 1.0, None, "recompute")
    chunk = shard.chunk_size * vocab * 4
    assert 2 * chunk <= 0.1 * logits.numel() * dtype.itemsize
    if device == "cpu":
        assert 4e6 <= chunk <= 5e6
    else:
        assert 64 <= shard.chunk_size <= 1024


def test_gradients_of_each_result():
    """That of the log-probs alone has the bits of the other function's; the two add up to both."""
    logits, labels, mask, grads = make_inputs()
    x = logits.requires_grad_()
    outputs = log_probs_and_entropy_from_logits(x, labels, mask)
    [of_first] = torch.autograd.grad(outputs[0], x, grads[0], retain_graph=True)
    [of_second] = torch.autograd.grad(outputs[1], x, grads[1], retain_graph=True)
    [both] = torch.autograd.grad(outputs, x, list(grads))
    [alone] = torch.autograd.grad(log_probs_from_logits(x, labels, mask), x, grads[0])
    assert of_first.equal(alone)
    torch.testing.assert_close(of_first + of_second, both, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(3, 7)}, ValueError, r"expected \[b, s, vocab / TP\]"),
        ({"logits": torch.zeros(3, 7, 11).long()}, TypeError, "floating-point"),
        ({"labels": torch.zeros(7, 3).long()}, ValueError, "The batch comes first"),
        ({"labels": torch.zeros(3, 7)}, TypeError, "integers"),
        ({"labels": torch.full((3, 7), -100)}, ValueError, "21 labels .* such as -100"),
        ({"labels": torch.full((3, 7), 11)}, ValueError, "vocabulary of 11, such as 11"),
        ({"loss_mask": torch.ones(3, 8)}, ValueError, "loss_mask has shape"),
        ({"loss_mask": True}, TypeError, "loss_mask must be a tensor"),
        ({"temperature": 0}, ValueError, "positive and finite"),
        ({"temperature": torch.tensor(1.0)}, TypeError, "number, got Tensor"),
        ({"chunk_size": 0}, ValueError, "above 0, got 0"),
        ({"backward": "checkpoint"}, ValueError, "recompute, keep-softmax, overwrite-logits"),
    ],
)
@BOTH
def test_messages(function, change, error, message):
    """What does not fit is refused, and the message says what would."""
    logits, labels, *_ = make_inputs()
    with pytest.raises(error, match=message):
        function(**{"logits": logits, "labels": labels} | change)


def test_labels_elsewhere_are_nan_where_nobody_looks():
    """On a GPU labels are not looked at: one outside of the vocabulary gives NaN, no wrong number.

    Here by the function behind the check.
    """
    from megatron_lossagg.log_probs.from_logits import _FromLogits
    from megatron_lossagg.log_probs.shard import LogitsShard

    logits, labels, *_ = make_inputs()
    labels[0, 0], labels[2, 6] = -100, VOCAB
    shard = LogitsShard.of(logits, FakeGroup(1), 1.0, None, "recompute")
    [log_probs] = _FromLogits.apply(logits, labels, None, shard, False)
    assert log_probs.isnan().nonzero().tolist() == [[0, 0], [2, 6]]
