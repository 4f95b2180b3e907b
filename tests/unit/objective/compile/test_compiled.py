"""`compile=True`: the same numbers, one graph for all widths, and plain Python where it fails."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading

import pytest
import torch
import torch._dynamo
from compiled_objectives import (
    BOTH,
    aggregator,
    assert_same,
    microbatch_of,
    remaining,
    values_and_gradient,
)
from one_process import make_aggregator

from megatron_lossagg import LossTerm, log_probs_and_entropy_from_logits
from megatron_lossagg.objective.compile import compiler

pytestmark = pytest.mark.usefixtures("forget_graphs")

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


@NEEDS_COMPILER
def test_compiled_numbers_are_those_of_plain_python(recwarn):
    """float64, NaN at masked tokens: values to 1e-14, gradients too, exactly 0 where masked."""
    microbatch, made = microbatch_of(3, 37), aggregator(compile=True)
    gradient = assert_same(made, aggregator(), microbatch)
    assert remaining(made) == BOTH
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


def test_aggregators_do_not_share_a_number_of_graphs(counter, recwarn):
    """torch stops at 8 graphs per code object; lowered here."""
    microbatch = microbatch_of(3, 8, masked=1.0)
    with torch._dynamo.config.patch(recompile_limit=1):
        for factor in (2.0, 3.0):
            made = make_aggregator(loss_fn=lambda o, _, f=factor: o * f, compile=True)
            values_and_gradient(made, microbatch)
            assert remaining(made) == BOTH
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
    assert not failures and remaining(made) == []


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
    assert remaining(made) == BOTH and counter.frame_count == 1
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
    assert remaining(made) == []
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
    assert remaining(made) == []


def test_memory_that_runs_out_is_no_fault_of_compiling(counter, monkeypatch):
    """It is raised, as another way would only hide it, and compiling goes on."""
    made = aggregator(compile=True)

    def out_of_memory(*arguments):
        raise torch.cuda.OutOfMemoryError("full")

    with monkeypatch.context() as patched, pytest.raises(torch.cuda.OutOfMemoryError):
        patched.setattr(made.settings.evaluate.remaining[0], "_with_gradients", out_of_memory)
        values_and_gradient(made, microbatch_of(3, 8))
    assert remaining(made) == BOTH


def test_faults_of_the_function_are_its_own(counter, recwarn):
    """An error that plain Python raises, too, comes out as it is, and compiling goes on."""

    def fails(output, microbatch):
        if output.shape[0] == 3:
            raise ValueError("three rows")
        return output + 1

    made = make_aggregator(loss_fn=fails, compile=True)
    with pytest.raises(ValueError, match="three rows"):
        values_and_gradient(made, microbatch_of(3, 4))
    assert remaining(made) == BOTH
    assert_same(made, make_aggregator(loss_fn=fails), microbatch_of(2, 4))
    assert remaining(made) == BOTH
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
