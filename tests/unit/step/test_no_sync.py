"""`loss_func` forward and backward: no host sync, no collective, nothing of a step outside tensors.

A dispatch mode looks at every operator that runs, those of the backward pass included. Under it, as
under anything that records operators, CPU tensors are summed as those of a device are; eager ones
may be looked at, which test_loss.py compares with that form.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from one_process import make_aggregator, make_microbatch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lossagg import LossTerm
from megatron_lossagg.modes import mode_names
from megatron_lossagg.objective.compile import compiler

# Operators that give the host a value, or a shape that depends on values.
HOST_SYNCS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "equal",
    "unique",
    "is_nonzero",
    "_unique2",
}


class NoSync(TorchDispatchMode):
    """Raises at an operator that syncs with the host, moves data to it, or communicates."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name, *_ = str(func).split(".")
        selects = name == "index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in HOST_SYNCS or selects:
            raise AssertionError(f"{func} waits for the device")
        if namespace != "aten":
            raise AssertionError(f"{func} is no operator of a loss: a collective?")
        return func(*args, **(kwargs or {}))


def loss_fn(output, microbatch):
    losses = output * 2
    return losses, {"mean": losses, "low": losses, "high": losses, "rows": losses}


METRICS = {"mean": "tokens", "low": "min", "high": "max", "rows": "sequences"}
OPTIONS = {"seq-mean-token-sum-norm": {"loss_scale_factor": 4}}
BUILT_IN = [mode for mode in mode_names() if "-" in mode]


def step_of(regime, mask, *, mode="token-mean", compile=False):
    """A planned step of one microbatch under R1 to R4, with terms and metrics of every kind."""
    terms = [
        LossTerm("policy", loss_fn, mode, metrics=METRICS, **OPTIONS.get(mode, {})),
        LossTerm("kl", lambda output, _: output.square(), "token-mean", coefficient=0.5),
        LossTerm("off", lambda output, _: output, "seq-mean-token-mean", coefficient=0.0),
    ]
    returns = "loss_and_num_tokens" if regime in ("R2", "R3") else "loss"
    aggregator = make_aggregator(
        None,
        loss_fn=None,
        terms=terms,
        per_token=regime in ("R3", "R4"),
        returns=returns,
        report_counts=True,
        compile=compile,
    )
    units = {"unit_ids": torch.tensor([0, 1])} if "unit" in mode else {}
    microbatch = make_microbatch([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], mask, **units)
    step = aggregator.begin_step([microbatch], num_units=2 if units else None)
    assert step.context.contract.regime == regime
    return step


@contextmanager
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduced(value):
    dist.all_reduce(value)
    return value


def run(step, microbatch, **options):
    loss, *_ = step.loss_func(microbatch, microbatch["losses"], **options)
    loss.backward()
    return loss


@pytest.mark.parametrize("regime", ["R1", "R2", "R3", "R4"])
@pytest.mark.parametrize("mode", BUILT_IN)
def test_loss_func_neither_syncs_nor_communicates(mode, regime):
    """Forward and backward, in every mode and regime, with terms, sums, minima and maxima."""
    step = step_of(regime, [[1, 1, 0], [1, 0, 0]], mode=mode)
    [microbatch] = step.microbatches
    with NoSync():
        run(step, microbatch)
        step.loss_func(microbatch, microbatch["losses"], non_loss_data=True)
    assert microbatch["losses"].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda losses: losses * losses.sum().item(), "_local_scalar_dense"),
        (lambda losses: losses * float(losses[0, 0]), "_local_scalar_dense"),
        (lambda losses: losses if losses.max() > 0 else -losses, "_local_scalar_dense"),
        (lambda losses: losses * losses.nonzero().shape[0], "nonzero"),
        (lambda losses: losses * losses[losses > 2].sum(), "index"),
        (lambda losses: losses * all_reduced(losses.detach().sum()), "c10d"),
    ],
)
def test_the_mode_sees_what_is_forbidden(wrong, name):
    """A sync or a collective that a loss_fn hides is found in loss_func."""
    aggregator = make_aggregator(loss_fn=lambda output, _: wrong(output))
    step = aggregator.begin_step([make_microbatch([[1.0, 2.0]], [[1, 1]])])
    [microbatch] = step.microbatches
    with one_rank_group(), pytest.raises(AssertionError, match=name), NoSync():
        run(step, microbatch)


def test_the_mode_sees_the_backward_pass():
    """A sync that only the backward pass makes is found, too."""

    class SyncInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, losses):
            return losses.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    aggregator = make_aggregator(loss_fn=lambda output, _: SyncInBackward.apply(output))
    step = aggregator.begin_step([make_microbatch([[1.0, 2.0]], [[1, 1]])])
    [microbatch] = step.microbatches
    with NoSync():
        loss, _ = step.loss_func(microbatch, microbatch["losses"])
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            loss.backward()


def outcome(step, keys):
    """A function of buffers: (losses, *weights) -> loss, its gradient, report, token count."""

    def function(losses, *weights):
        microbatch = dict(zip(keys, weights, strict=True))
        loss, *num_tokens, report = step.loss_func(microbatch, losses)
        [gradient] = torch.autograd.grad(loss, losses)
        return loss, gradient, report["loss"], report["policy"], *num_tokens

    return function


def buffers_of(step, device="cpu"):
    [microbatch] = step.microbatches
    keys = sorted(key for key in microbatch if key.startswith("loss_weights"))
    tensors = [microbatch["losses"].detach(), *(microbatch[key] for key in keys)]
    losses, *weights = [tensor.to(device) for tensor in tensors]
    return keys, [losses.requires_grad_(), *weights]


MASKS = ([[1, 1, 1], [1, 0, 0]], [[0, 1, 0], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize("regime", ["R1", "R2", "R3", "R4"])
@pytest.mark.parametrize("mode", BUILT_IN)
def test_recorded_operators_serve_other_steps(mode, regime):
    """The operators of step 1, replayed without Python on other masks and counts, are right."""
    first, *others = [step_of(regime, mask, mode=mode) for mask in MASKS]
    keys, buffers = buffers_of(first)
    replay = make_fx(outcome(first, keys))(*buffers)
    losses = set()
    for step in (first, *others):
        keys, tensors = buffers_of(step)
        expected = outcome(step, keys)(*tensors)
        with torch.no_grad():
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
        for found, value in zip(replay(*buffers), expected, strict=True):
            assert torch.equal(found, value)
        losses.add(float(expected[0]))
    assert len(losses) > 1


def test_a_compiled_loss_serves_other_steps(monkeypatch):
    """The same buffers, refilled for each step, through one compiled callable."""
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    first, *others = [step_of("R1", mask, compile=True) for mask in MASKS]
    keys, buffers = buffers_of(first)
    function = outcome(first, keys)
    for step, mask in zip((first, *others), MASKS, strict=True):
        _, tensors = buffers_of(step)
        expected = outcome(step_of("R1", mask), keys)(*tensors)
        with torch.no_grad():
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
        for found, value in zip(function(*buffers), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-14, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("regime", ["R1", "R3"])
def test_cuda_graph_serves_other_steps(regime):
    """A captured CUDA graph of loss_func and its backward is right for another step's data."""
    first, *others = [step_of(regime, mask) for mask in MASKS]
    keys, buffers = buffers_of(first, "cuda")
    function = outcome(first, keys)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*buffers)
    for step in (first, *others):
        keys, tensors = buffers_of(step, "cuda")
        expected = outcome(step, keys)(*tensors)
        with torch.no_grad():
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
        graph.replay()
        for found, value in zip(captured, expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-14, atol=0)


@pytest.mark.parametrize("regime", ["R1", "R3"])
def test_loss_func_is_one_graph(regime):
    """Dynamo traces the terms, metrics and sums of a microbatch without a graph break."""
    step = step_of(regime, [[1, 1, 0], [1, 0, 0]])
    [microbatch] = step.microbatches
    context = step.context
    weights = [microbatch[key] for key in context.weights_keys]
    explained = torch._dynamo.explain(context.evaluate)(
        microbatch["losses"], microbatch, weights, context.coefficients
    )
    assert explained.graph_count == 1 and explained.graph_break_count == 0
