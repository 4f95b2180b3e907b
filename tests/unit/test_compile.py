"""`compile=True`: the same numbers, one graph for all widths, and plain Python where it fails."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import torch._dynamo
from one_process import make_aggregator
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_lossagg import LossTerm, token_losses
from megatron_lossagg.compiled import CompiledFunction

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def policy(output, microbatch):
    losses = token_losses.ppo_clip(
        output, microbatch["old"], microbatch["advantages"], microbatch["loss_mask"], dual_clip=3.0
    )
    log_ratio = (output - microbatch["old"]).detach()
    return losses, {"log_ratio": log_ratio, "largest": log_ratio}


def kl(output, microbatch):
    return token_losses.kl_penalty(output, microbatch["old"], microbatch["loss_mask"])


def aggregator(**options):
    terms = [
        LossTerm(
            "policy",
            policy,
            "seq-mean-token-mean",
            metrics={"log_ratio": "tokens", "largest": "max"},
        ),
        LossTerm("kl", kl, "token-mean", coefficient=lambda iteration: 0.1 * iteration),
    ]
    return make_aggregator(None, loss_fn=None, terms=terms, **options)


def microbatch_of(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    old, advantages, losses = random(), random(), random()
    losses[mask == 0] = math.nan
    return {
        "losses": losses.requires_grad_(),
        "old": old,
        "advantages": advantages,
        "loss_mask": mask,
    }


def values_and_gradient(made, microbatch, iteration=1):
    step = made.begin_step([microbatch], iteration=iteration)
    [planned] = step.microbatches
    planned["losses"].grad = None
    loss, report = step.loss_func(planned, planned["losses"])
    loss.backward()
    values = step.report([report])
    step.validate()
    return values, planned["losses"].grad


@NEEDS_COMPILER
def test_compiled_numbers_are_those_of_plain_python(recwarn):
    """float64, NaN at masked tokens: values to 1e-14, gradients too, exactly 0 where masked."""
    microbatch = microbatch_of(3, 37)
    found, gradient = values_and_gradient(aggregator(compile=True), microbatch)
    expected, plain = values_and_gradient(aggregator(), microbatch)
    assert found == pytest.approx(expected, rel=1e-14)
    torch.testing.assert_close(gradient, plain, rtol=1e-13, atol=1e-16)
    assert torch.equal(gradient == 0, (microbatch["loss_mask"] == 0) | (plain == 0))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_widths_rows_and_coefficients_do_not_recompile(monkeypatch):
    """Ten shapes with a coefficient each are compiled once, three single rows once more."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile_with(f, backend=counter, **kw))
    made, frames = aggregator(compile=True), []
    for index in range(10):
        microbatch = microbatch_of(2 + index % 4, 5 + 3 * index, seed=index)
        found, gradient = values_and_gradient(made, microbatch, iteration=index)
        frames.append(counter.frame_count)
        expected, plain = values_and_gradient(aggregator(), microbatch, iteration=index)
        assert found == pytest.approx(expected, rel=1e-14)
        torch.testing.assert_close(gradient, plain, rtol=1e-13, atol=1e-16)
    assert frames[0] > 0 and set(frames) == {frames[0]}
    packed = []
    for width in (9, 77, 130):
        values_and_gradient(made, microbatch_of(1, width))
        packed.append(counter.frame_count)
    assert set(packed) == {packed[0]}


def test_a_compiler_that_fails_leaves_plain_python(monkeypatch):
    """One warning that names the reason, then the numbers of plain Python, call after call."""

    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile_with(f, backend=broken, **kw))
    made, microbatch = aggregator(compile=True), microbatch_of(3, 8)
    with pytest.warns(RuntimeWarning, match="runs uncompiled .*no C") as caught:
        first = values_and_gradient(made, microbatch)
        second = values_and_gradient(made, microbatch)
    assert len([w for w in caught if issubclass(w.category, RuntimeWarning)]) == 1
    expected, plain = values_and_gradient(aggregator(), microbatch)
    for values, gradient in (first, second):
        assert values == expected and torch.equal(gradient, plain)


def test_a_loss_fn_that_cannot_be_traced_runs_in_python():
    """A branch on data in loss_fn breaks the graph: a warning, and it works as without compile."""
    made = make_aggregator(
        loss_fn=lambda output, _: output if output.sum() > 0 else -output, compile=True
    )
    with pytest.warns(RuntimeWarning, match="loss_fn of LossAggregator could not be compiled"):
        values, _ = values_and_gradient(made, microbatch_of(2, 3) | {"loss_mask": torch.ones(2, 3)})
    assert math.isnan(values["loss"])


def test_faults_of_the_function_are_its_own(recwarn):
    """An error that plain Python raises, too, comes out as it is, and compiling goes on."""

    def fails(x):
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return x + 1

    function = CompiledFunction(fails, "it")
    function._compiled = torch.compile(fails, backend="eager", dynamic=True, fullgraph=True)
    with pytest.raises(ValueError, match="three rows"):
        function(torch.ones(3))
    assert function.is_compiled and torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
