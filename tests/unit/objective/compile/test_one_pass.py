"""`compile=True` in one pass: the gradient beside the sums is that of plain Python, or not made."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from compiled_objectives import (
    BOTH,
    aggregator,
    assert_same,
    microbatch_of,
    policy,
    remaining,
    values_and_gradient,
)
from one_process import make_aggregator

from megatron_lossagg import LossTerm

pytestmark = pytest.mark.usefixtures("forget_graphs")


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
            assert remaining(made) == ["TwoPasses"]
    for found, expected in zip(*collected, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_a_parameter_that_comes_to_need_a_gradient(counter):
    """Frozen at first, it is a constant; as soon as it isn't, it gets its gradient."""
    scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64), requires_grad=False)
    made = make_aggregator(loss_fn=lambda output, _: output * scale, compile=True)
    microbatch = microbatch_of(3, 8, masked=1.0)
    values_and_gradient(made, microbatch)
    assert remaining(made) == BOTH
    scale.requires_grad_(True)
    values_and_gradient(made, microbatch)
    assert remaining(made) == ["TwoPasses"]
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
    assert remaining(made) == BOTH and counter.frame_count == 1


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
    made.settings.evaluate.remaining[0]._with_gradients = lambda *args: calls.append(args)
    assert_same(made, plain, microbatch_of(3, 8, masked=1.0), output_of=output_of)
    assert not calls and remaining(made) == BOTH and counter.frame_count == 1
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
    assert remaining(made) == BOTH


def test_what_needs_a_gradient_is_told_to_loss_fn(counter):
    """A loss_fn that asks sees what it would see uncompiled."""

    def loss_fn(output, _):
        losses, other = output
        return losses * (2 if losses.requires_grad else 3) * (5 if other.requires_grad else 7)

    made, plain = make_aggregator(loss_fn=loss_fn, compile=True), make_aggregator(loss_fn=loss_fn)
    microbatch = microbatch_of(3, 8, masked=1.0)
    assert_same(made, plain, microbatch, output_of=lambda losses: (losses, losses.detach()))
    assert remaining(made) == BOTH


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
    assert remaining(made) == ["TwoPasses"]
    checkpointed(torch.ones(2, requires_grad=True)).sum().backward()
