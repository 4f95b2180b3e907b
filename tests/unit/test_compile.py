"""`compile=True`: the same numbers, one graph for all widths, and plain Python where it fails.

Expected are the numbers of the same objective without `compile`, which other tests compare with
plain autograd.
"""

from __future__ import annotations

import copy
import math
import pickle
import shutil
import threading
from typing import NamedTuple

import pytest
import torch
import torch._dynamo
from one_process import make_aggregator
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_lossagg import (
    LossTerm,
    compiler,
    log_probs_and_entropy_from_logits,
    token_losses,
)
from megatron_lossagg.one_pass import OnePass

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counter(monkeypatch):
    """Counts graphs; without a C++ compiler."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiler, "BACKEND", counter)
    return counter


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


def microbatch_of(rows, width, seed=0, *, masked=math.nan):
    generator = torch.Generator().manual_seed(seed)

    def random():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    old, advantages, losses = random(), random(), random()
    losses[mask == 0] = masked
    return {
        "losses": losses.requires_grad_(),
        "old": old,
        "advantages": advantages,
        "loss_mask": mask,
    }


def values_and_gradient(made, microbatch, iteration=1, output_of=None):
    step = made.begin_step([microbatch], iteration=iteration)
    [planned] = step.microbatches
    losses = planned["losses"]
    losses.grad = None
    loss, report = step.loss_func(planned, losses if output_of is None else output_of(losses))
    loss.backward()
    values = step.report([report])
    step.validate()
    return values, planned["losses"].grad


def sums_of(made):
    return made._settings.objective._sums_of


def ways_of(made):
    """Which ways of compiling are still tried."""
    return ["one pass" if isinstance(way, OnePass) else "two passes" for way in sums_of(made).ways]


BOTH_WAYS = ["one pass", "two passes"]


def assert_same(made, plain, microbatch, iteration=1, *, output_of=None):
    """Values and gradients of a compiled objective and of the same one uncompiled."""
    outcomes = []
    for aggregator in (made, plain):
        outcomes.append(values_and_gradient(aggregator, microbatch, iteration, output_of))
    (found, gradient), (expected, plain_gradient) = outcomes
    assert found == pytest.approx(expected, rel=1e-14, nan_ok=True)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-13, atol=1e-16)
    assert gradient.dtype == plain_gradient.dtype
    return gradient


@NEEDS_COMPILER
def test_compiled_numbers_are_those_of_plain_python(recwarn):
    """float64, NaN at masked tokens: values to 1e-14, gradients too, exactly 0 where masked."""
    microbatch, made = microbatch_of(3, 37), aggregator(compile=True)
    gradient = assert_same(made, aggregator(), microbatch)
    assert ways_of(made) == BOTH_WAYS
    _, plain = values_and_gradient(aggregator(), microbatch)
    assert torch.equal(gradient == 0, (microbatch["loss_mask"] == 0) | (plain == 0))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_widths_rows_and_coefficients_do_not_recompile(counter):
    """Ten shapes with a coefficient each, 0 among them, are one graph; single rows are another."""
    made, frames = aggregator(compile=True), []
    for index in range(10):
        microbatch = microbatch_of(2 + index % 4, 5 + 3 * index, seed=index)
        assert_same(made, aggregator(), microbatch, iteration=index)
        frames.append(counter.frame_count)
    assert frames[0] == 1 and set(frames) == {1}
    packed = []
    for width in (9, 77, 130):
        values_and_gradient(made, microbatch_of(1, width))
        packed.append(counter.frame_count)
    assert set(packed) == {2}


def test_a_coefficient_of_0_keeps_nan_out(counter):
    """A term that is NaN everywhere, with a gradient that is, at coefficient 0 and then not."""
    terms = [
        LossTerm("policy", policy, "token-mean", metrics={"log_ratio": "sum", "largest": "min"}),
        LossTerm(
            "bad", lambda o, _: (o - o).log() * 0, "token-mean", coefficient=lambda i: float(i)
        ),
    ]
    made = make_aggregator(None, loss_fn=None, terms=terms, compile=True)
    plain = make_aggregator(None, loss_fn=None, terms=terms)
    microbatch = microbatch_of(3, 8) | {"loss_mask": torch.ones(3, 8)}
    microbatch["losses"] = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert_same(made, plain, microbatch, iteration=0)
    _, gradient = values_and_gradient(made, microbatch, iteration=1)
    assert gradient.isnan().all() and counter.frame_count == 1


def test_a_factor_from_above_and_a_second_backward_pass(counter):
    """The gradient is that of any factor, again and again; a second derivative raises."""
    made, microbatch = aggregator(compile=True), microbatch_of(3, 8)
    gradients = {}
    for name, chosen in (("compiled", made), ("plain", aggregator())):
        [planned] = chosen.begin_step([microbatch], iteration=1).microbatches
        step = chosen.begin_step([microbatch], iteration=1)
        loss, _ = step.loss_func(planned, planned["losses"])
        losses, upstream = planned["losses"], torch.tensor(-3.5, dtype=torch.float64)
        gradients[name] = [
            torch.autograd.grad(loss, losses, upstream, retain_graph=True)[0] for _ in range(2)
        ]
        if name == "compiled":
            with pytest.raises(RuntimeError, match="no second derivatives"):
                torch.autograd.grad(loss, losses, create_graph=True)
    for found, expected in zip(gradients["compiled"], gradients["plain"], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("kind", ["parameter", "made of a parameter", "in the microbatch"])
def test_gradients_that_do_not_come_through_the_output(counter, recwarn, kind):
    """A tensor that loss_fn knows from elsewhere gets its gradient, too: it takes two passes."""
    source = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    microbatch = microbatch_of(3, 8, masked=1.0)
    collected = []
    for compile in (True, False):
        source.grad = None
        scale = source.exp() if kind == "made of a parameter" else source
        if kind == "in the microbatch":
            microbatch["scale"] = source

        def loss_fn(output, batch, scale=scale):
            return output * batch.get("scale", scale)

        made = make_aggregator(loss_fn=loss_fn, compile=compile)
        _, gradient = values_and_gradient(made, microbatch)
        collected.append((gradient, source.grad.clone()))
        if compile:
            assert ways_of(made) == ["two passes"]
    for found, expected in zip(*collected, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_a_compiler_that_is_switched_off():
    """As by TORCH_COMPILE_DISABLE=1: gradients that do not come through the output, too."""
    scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    microbatch, found = microbatch_of(3, 8, masked=1.0), []
    for compile in (True, False):
        scale.grad = None
        made = make_aggregator(loss_fn=lambda output, _: output * scale, compile=compile)
        with torch.compiler.set_stance("force_eager"):
            _, gradient = values_and_gradient(made, microbatch)
        found.append((gradient, scale.grad.clone()))
    for compiled, expected in zip(*found, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(compiled, expected, rtol=1e-13, atol=0)


def test_a_parameter_that_comes_to_need_a_gradient(counter):
    """Frozen at first, it is a constant; as soon as it isn't, it gets its gradient."""
    scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64), requires_grad=False)
    made = make_aggregator(loss_fn=lambda output, _: output * scale, compile=True)
    microbatch = microbatch_of(3, 8, masked=1.0)
    values_and_gradient(made, microbatch)
    assert ways_of(made) == BOTH_WAYS
    scale.requires_grad_(True)
    values_and_gradient(made, microbatch)
    assert ways_of(made) == ["two passes"]
    assert float(scale.grad) == pytest.approx(
        float(microbatch["losses"].detach()[microbatch["loss_mask"] == 1].mean()), rel=1e-13
    )


class Output(NamedTuple):
    log_probs: torch.Tensor
    entropies: torch.Tensor


def of_output(kind, losses):
    """The model's output in different shapes, and the loss_fn that reads it."""
    other = losses.detach().square()
    return {
        "tuple with one part differentiated": lambda: ((losses, other), lambda o, _: o[0] * o[1]),
        "dict": lambda: ({"a": losses, "b": losses.exp()}, lambda o, _: o["a"] * o["b"]),
        "named tuple": lambda: (
            Output(losses, losses.sin()),
            lambda o, _: o.log_probs * o.entropies,
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["tuple with one part differentiated", "dict", "named tuple"])
def test_outputs_of_several_tensors(counter, kind):
    """Each gets its gradient in one pass, those that need none get none."""
    microbatch = microbatch_of(3, 8, masked=1.0)
    _, loss_fn = of_output(kind, microbatch["losses"])
    made = make_aggregator(loss_fn=loss_fn, compile=True)
    plain = make_aggregator(loss_fn=loss_fn)
    assert_same(made, plain, microbatch, output_of=lambda losses: of_output(kind, losses)[0])
    assert ways_of(made) == BOTH_WAYS and counter.frame_count == 1


@pytest.mark.parametrize(
    ("name", "output_of", "loss_fn"),
    [
        (
            "logits",
            lambda x: x[:, :, None] * torch.arange(5, dtype=torch.float64),
            lambda o, _: -torch.log_softmax(o, dim=-1)[..., 2],
        ),
        ("bfloat16", lambda x: x.bfloat16(), lambda o, _: o.float().square()),
        ("not tensors only", lambda x: {"x": x, "name": "x"}, lambda o, _: o["x"] * 2),
    ],
)
def test_other_outputs_take_two_passes(counter, recwarn, name, output_of, loss_fn):
    """Logits, lower precision (whose gradient a loss scale must reach first) and other objects."""
    made, plain = make_aggregator(loss_fn=loss_fn, compile=True), make_aggregator(loss_fn=loss_fn)
    assert_same(made, plain, microbatch_of(3, 8, masked=1.0), output_of=output_of)
    calls = []
    sums_of(made)._one_pass._compiled = lambda *args: calls.append(args)
    assert_same(made, plain, microbatch_of(3, 8, masked=1.0), output_of=output_of)
    assert not calls and ways_of(made) == BOTH_WAYS and counter.frame_count == 1
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


class Squared(torch.autograd.Function):
    """x^2 with a gradient that is not that of its forward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return gradient * 7 * x


@pytest.mark.parametrize("kind", ["of the output", "of a part"])
def test_a_function_with_a_backward_pass_of_its_own(counter, kind):
    """It is used, also where the function gets the output itself."""
    output_of = {"of a part": lambda x: {"a": x.sin(), "b": x}}.get(kind)
    loss_fn = {
        "of the output": lambda output, _: Squared.apply(output),
        "of a part": lambda output, _: Squared.apply(output["a"]) * output["b"],
    }[kind]
    made, plain = make_aggregator(loss_fn=loss_fn, compile=True), make_aggregator(loss_fn=loss_fn)
    assert_same(made, plain, microbatch_of(3, 8, masked=1.0), output_of=output_of)
    assert ways_of(made) == BOTH_WAYS


def test_what_needs_a_gradient_is_told_to_loss_fn(counter):
    """A loss_fn that asks sees what it would see uncompiled."""

    def loss_fn(output, _):
        losses, other = output
        return losses * (2 if losses.requires_grad else 3) * (5 if other.requires_grad else 7)

    made, plain = make_aggregator(loss_fn=loss_fn, compile=True), make_aggregator(loss_fn=loss_fn)
    microbatch = microbatch_of(3, 8, masked=1.0)
    assert_same(made, plain, microbatch, output_of=lambda losses: (losses, losses.detach()))
    assert ways_of(made) == BOTH_WAYS


def test_a_loss_that_does_not_depend_on_the_output_has_no_graph(counter):
    """So that the backward pass raises as it does uncompiled, and no gradient of zeros is made."""
    terms = [
        LossTerm("detached", lambda output, _: output.detach(), "token-mean"),
        LossTerm("other", lambda output, _: output, "token-mean", coefficient=lambda i: float(i)),
    ]
    microbatch = microbatch_of(3, 8, masked=1.0)
    for options in ({"compile": True}, {}):
        made = make_aggregator(None, loss_fn=None, terms=terms, **options)
        with pytest.raises(RuntimeError, match="does not require grad"):
            values_and_gradient(made, microbatch, iteration=0)
        _, gradient = values_and_gradient(made, microbatch, iteration=1)
        assert gradient.abs().sum() > 0


def test_a_failure_midway_leaves_torch_as_it_was(counter):
    """Checkpointing works in loss_fn, which one pass cannot do, and anywhere else afterwards."""

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False)

    made = make_aggregator(loss_fn=lambda output, _: checkpointed(output) * output, compile=True)
    plain = make_aggregator(loss_fn=lambda output, _: output.exp() * output)
    assert_same(made, plain, microbatch_of(3, 8, masked=1.0))
    assert ways_of(made) == ["two passes"]
    checkpointed(torch.ones(2, requires_grad=True)).sum().backward()


def test_aggregators_do_not_share_a_number_of_graphs(counter, recwarn):
    """torch stops at 8 graphs per code object; lowered here."""
    microbatch = microbatch_of(3, 8, masked=1.0)
    with torch._dynamo.config.patch(recompile_limit=1):
        for factor in (2.0, 3.0):
            made = make_aggregator(loss_fn=lambda o, _, f=factor: o * f, compile=True)
            values_and_gradient(made, microbatch)
            assert ways_of(made) == BOTH_WAYS
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


class Scaled:
    factor = 1.0

    def __call__(self, output, microbatch):
        return output * self.factor


def test_a_copy_has_the_loss_fn_of_the_copy(counter):
    """It can be pickled, and what changes in the original does not reach a copy."""
    loss_fn, microbatch = Scaled(), microbatch_of(3, 8, masked=1.0)
    made = make_aggregator(loss_fn=loss_fn, compile=True)
    plain = make_aggregator(loss_fn=Scaled())
    copied = copy.deepcopy(made)
    loss_fn.factor = 5.0
    assert isinstance(pickle.loads(pickle.dumps(made)), type(made))
    assert_same(copied, plain, microbatch)


@pytest.mark.filterwarnings("ignore:loss_fn of LossAggregator could not be compiled")
def test_threads_that_find_out_together_that_compiling_fails():
    """None of them raises."""
    made = make_aggregator(loss_fn=lambda o, _: o if o.sum() > 0 else -o, compile=True)
    step = made.begin_step([microbatch_of(3, 8, masked=1.0)])
    [planned], failures, barrier = step.microbatches, [], threading.Barrier(4)

    def call():
        barrier.wait()
        try:
            step.loss_func(planned, planned["losses"])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and ways_of(made) == []


def test_an_extreme_value_of_no_token():
    """A microbatch without positions has a maximum, too: that of nothing."""
    microbatch = microbatch_of(3, 0)
    values, _ = values_and_gradient(aggregator(), microbatch)
    assert values["loss"] == 0 and math.isnan(values["largest"])


def test_without_gradients_there_is_no_gradient(counter):
    """An evaluation makes none; its values are the same."""
    made, plain, microbatch = aggregator(compile=True), aggregator(), microbatch_of(3, 8)
    reports = []
    for chosen in (made, plain):
        step = chosen.begin_step([microbatch], iteration=1)
        [planned] = step.microbatches
        with torch.no_grad():
            loss, report = step.loss_func(planned, planned["losses"])
        assert not loss.requires_grad
        reports.append(step.report([report]))
    assert reports[0] == pytest.approx(reports[1], rel=1e-14)


def test_what_prepares_the_logits_stays_out_of_the_graph(counter, recwarn):
    """Log-probabilities and entropies of our own function, and compiled terms made of them."""
    terms = [
        LossTerm("policy", lambda o, _: -o[0].exp(), "seq-mean-token-mean"),
        LossTerm("entropy", lambda o, _: -o[1], "token-mean", coefficient=0.01),
    ]

    def prepare(logits, microbatch):
        return log_probs_and_entropy_from_logits(
            logits, microbatch["labels"], microbatch["loss_mask"]
        )

    made = make_aggregator(None, loss_fn=prepare, terms=terms, compile=True)
    plain = make_aggregator(None, loss_fn=prepare, terms=terms)
    generator = torch.Generator().manual_seed(1)
    microbatch = microbatch_of(3, 8)
    microbatch["labels"] = torch.randint(7, (3, 8), generator=generator)
    vocabulary = torch.randn(7, generator=generator, dtype=torch.float64)
    assert_same(
        made, plain, microbatch, output_of=lambda x: x.nan_to_num()[:, :, None] * vocabulary
    )
    assert ways_of(made) == BOTH_WAYS and counter.frame_count == 1
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_a_compiler_that_fails_leaves_plain_python(monkeypatch):
    """One warning that names the reason, then the numbers of plain Python, call after call."""

    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(compiler, "BACKEND", broken)
    made, microbatch = aggregator(compile=True), microbatch_of(3, 8)
    with pytest.warns(RuntimeWarning, match="runs uncompiled .*no C") as caught:
        first = values_and_gradient(made, microbatch)
        second = values_and_gradient(made, microbatch)
    assert len([w for w in caught if issubclass(w.category, RuntimeWarning)]) == 1
    assert ways_of(made) == []
    expected, plain = values_and_gradient(aggregator(), microbatch)
    for values, gradient in (first, second):
        assert values == expected and torch.equal(gradient, plain)


@pytest.mark.parametrize("kind", ["values", "logits"])
def test_a_loss_fn_that_cannot_be_traced_runs_in_python(kind):
    """A branch on data in loss_fn breaks the graph: a warning, and it works as without compile."""

    def loss_fn(output, _):
        losses = output if kind == "values" else output[..., 0]
        return losses if losses.sum() > 0 else -losses

    made = make_aggregator(loss_fn=loss_fn, compile=True)
    microbatch = microbatch_of(2, 3, masked=1.0)
    with pytest.warns(RuntimeWarning, match="loss_fn of LossAggregator could not be compiled"):
        assert_same(
            made,
            make_aggregator(loss_fn=loss_fn),
            microbatch,
            output_of=None if kind == "values" else lambda losses: losses[..., None],
        )
    assert ways_of(made) == []


def test_memory_that_runs_out_is_no_fault_of_compiling(counter, monkeypatch):
    """It is raised, as another way would only hide it, and compiling goes on."""
    made = aggregator(compile=True)

    def out_of_memory(*arguments):
        raise torch.cuda.OutOfMemoryError("full")

    with monkeypatch.context() as patched, pytest.raises(torch.cuda.OutOfMemoryError):
        patched.setattr(sums_of(made)._one_pass, "_compiled", out_of_memory)
        values_and_gradient(made, microbatch_of(3, 8))
    assert ways_of(made) == BOTH_WAYS


def test_faults_of_the_function_are_its_own(counter, recwarn):
    """An error that plain Python raises, too, comes out as it is, and compiling goes on."""

    def fails(output, microbatch):
        if output.shape[0] == 3:
            raise ValueError("three rows")
        return output + 1

    made = make_aggregator(loss_fn=fails, compile=True)
    with pytest.raises(ValueError, match="three rows"):
        values_and_gradient(made, microbatch_of(3, 4))
    assert ways_of(made) == BOTH_WAYS
    assert_same(made, make_aggregator(loss_fn=fails), microbatch_of(2, 4))
    assert ways_of(made) == BOTH_WAYS
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
