"""What Megatron-LM logs with the adapter: several evaluation batches, metrics, empty batches.

On the real schedules, with tensor-parallel rank 0 alone reading data, though another rank logs.
"""

from __future__ import annotations

import pytest
import torch
from megatron_lm_loop import (
    MODE,
    NAME,
    Host,
    batch_of_seed,
    call_model,
    get_batch,
    num_tokens_of,
    policy_losses,
    reference,
)

from megatron_lossagg import LossAggError, LossAggregator
from megatron_lossagg.testing import RankFailure
from megatron_lossagg.testing.gradients import relative_error
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg_plugin.megatron_lm import make_forward_step, skip_empty_steps

BOTH_REGIMES = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
LAYOUTS = ["D=2 M=2", "TP=2 PP=2 M=2"]


def forward_step_of(host, **options):
    return make_forward_step(
        host.aggregator,
        get_batch,
        call_model=call_model,
        num_microbatches=host.layout.num_microbatches,
        **options,
    )


def with_metrics(output, batch):
    losses, advantages = policy_losses(output, batch), batch["advantages"]
    metrics = {"advantage": advantages, "per_sequence": advantages, "is_good": advantages > 0}
    return losses, metrics | {"lowest": advantages, "highest": advantages}


METRICS = {"advantage": "tokens", "per_sequence": "sequences", "is_good": "tokens"}
METRICS |= {"lowest": "min", "highest": "max"}


def metrics_of(seed):
    """In one process, from the whole batch."""
    rows = batch_of_seed(seed, Layout()).rows
    mask = rows["loss_mask"] > 0
    counted = rows["advantages"][mask]
    return {
        "advantage": counted.mean().item(),
        "per_sequence": (counted.sum() / mask.any(dim=1).sum()).item(),
        "is_good": (counted > 0).double().mean().item(),
        "lowest": counted.min().item(),
        "highest": counted.max().item(),
    }


def _train_and_evaluate(layout, per_token, sft):
    host = Host(layout, per_token, loss_fn=with_metrics, metrics=METRICS)
    forward_step = forward_step_of(host)
    trained, _ = host.train_step(forward_step, host.iterators(0))
    evaluated = host.evaluate(forward_step, host.iterators(2, 3), 2, layout.num_microbatches, sft)
    return trained, evaluated


@BOTH_REGIMES
@pytest.mark.parametrize("sft", [False, True], ids=["plain", "sft"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_metrics_of_training_and_evaluation(rank_pool, text, sft, per_token):
    """On every rank that may log; minima and maxima while training, where checks complete them.

    Over two evaluation batches, one with a fully masked microbatch, each value is their mean.
    """
    layout = Layout.parse(text)
    results = rank_pool.run(
        _train_and_evaluate, layout, per_token, sft, world_size=layout.world_size
    )
    reporting = [result for result in results if result[0]]
    assert len(reporting) == layout.world_size // layout.pp
    losses = [reference(rank_pool, seed)[0] for seed in (0, 2, 3)]
    of_evaluation = [metrics_of(seed) for seed in (2, 3)]
    mean = {name: sum(m[name] for m in of_evaluation) / 2 for name in ("advantage", "per_sequence")}
    for trained, evaluated in reporting:
        expected = {NAME: losses[0], **metrics_of(0)}
        assert trained == {
            name: pytest.approx(value, rel=1e-12) for name, value in expected.items()
        }
        assert set(evaluated) == {NAME, "advantage", "per_sequence", "is_good"}
        assert evaluated[NAME] == pytest.approx(sum(losses[1:]) / 2, rel=1e-5)
        for name, value in mean.items():
            assert evaluated[name] == pytest.approx(value, rel=1e-5)


def _evaluate(layout, per_token, average):
    host = Host(layout, per_token, loss_agg_mode="token-mean")
    forward_step = forward_step_of(host, evaluation_average=average)
    return host.evaluate(forward_step, host.iterators(2, 3), 2, layout.num_microbatches)


def _token_means(rank_pool):
    return [rank_pool.run(_one_evaluation, seed, world_size=1)[0] for seed in (2, 3)]


def _one_evaluation(seed):
    from megatron_lossagg.testing.reference import reference_run

    return reference_run(Host.gpt, batch_of_seed(seed, Layout()), policy_losses, "token-mean")[0]


@BOTH_REGIMES
@pytest.mark.parametrize("average", ["steps", "tokens"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_the_average_over_evaluation_batches(rank_pool, text, average, per_token):
    """One meaning for both flags; with "tokens" what Megatron-LM's own function gives."""
    layout = Layout.parse(text)
    results = rank_pool.run(_evaluate, layout, per_token, average, world_size=layout.world_size)
    weights = [1, 1] if average == "steps" else [num_tokens_of(seed) for seed in (2, 3)]
    assert average == "steps" or weights[0] != weights[1]
    losses = _token_means(rank_pool)
    expected = sum(w * j for w, j in zip(weights, losses, strict=True)) / sum(weights)
    found = [result for result in results if result]
    assert found and all(result == {NAME: pytest.approx(expected, rel=1e-5)} for result in found)


class Masked(Host):
    """Batches without a valid token."""

    def iterators(self, *seeds, num_microbatches=None):
        raw = super().iterators(*seeds, num_microbatches=num_microbatches)
        chunks = raw if isinstance(raw, list) else [raw]
        masked = [
            None if it is None else ({**m, "loss_mask": 0 * m["loss_mask"]} for m in _until_end(it))
            for it in chunks
        ]
        return masked if isinstance(raw, list) else masked[0]


def _until_end(iterator):
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return


class _Optimizer:
    def __init__(self):
        self.num_steps = 0

    def step(self):
        self.num_steps += 1
        return True, 1.0, 0


def _train_on_nothing(layout, per_token):
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    found = []
    for kind in (Masked, Host):
        host = kind(layout, per_token, loss_fn=with_metrics, metrics=METRICS)
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        optimizer = skip_empty_steps(_Optimizer(), host.aggregator)
        assert skip_empty_steps(optimizer, host.aggregator) is optimizer
        iterators = host.iterators(0)
        for chunk in host.chunks:
            chunk.zero_grad_buffer()
        store = host.schedule(forward_step_of(host), iterators, layout.num_microbatches, False)
        updated, *_ = optimizer.step()
        found.append((host.reduced(store), updated, optimizer.num_steps))
    return found


@BOTH_REGIMES
@pytest.mark.parametrize("text", LAYOUTS)
def test_a_batch_without_a_token(rank_pool, text, per_token):
    """Logged as loss 0 in both settings, metrics as NaN; the optimizer skips it on every rank."""
    layout = Layout.parse(text)
    results = rank_pool.run(_train_on_nothing, layout, per_token, world_size=layout.world_size)
    for (logged, updated, num_steps), (_, updated_then, num_steps_then) in results:
        assert (updated, num_steps, updated_then, num_steps_then) == (False, 0, True, 1)
        if logged:
            assert logged.pop(NAME) == 0.0
            assert set(logged) == set(METRICS) and all(v != v for v in logged.values())


def _without_config(layout, per_token, how):
    host = Host(layout, per_token)
    config = unwrap(host.chunks[0]).config
    calls = []
    given = {"function": {"model_config": lambda: calls.append(1) or config}, "none": {}}[how]
    host.aggregator = LossAggregator(
        policy_losses,
        loss_agg_mode=MODE,
        weights_key="loss_mask",
        weight_dtype=torch.float64,
        **given,
    )
    forward_step = forward_step_of(host)
    losses, gradient = host.train_step(forward_step, host.iterators(0))
    assert len(calls) == (how == "function") and host.aggregator.model_config is config
    return losses, gradient


@BOTH_REGIMES
@pytest.mark.parametrize("how", ["function", "none"])
def test_a_config_that_does_not_exist_before_pretrain(rank_pool, how, per_token):
    """A function gives it when it is needed, or the model's own is taken at the first step."""
    layout = Layout.parse("TP=2 PP=2 M=2")
    loss, expected = reference(rank_pool, 0)
    results = rank_pool.run(_without_config, layout, per_token, how, world_size=4)
    assert relative_error(results[0][1], expected) < (1e-6 if per_token else 1e-12)
    assert results[-1][0] == {NAME: pytest.approx(loss, rel=1e-12)}


def test_a_config_that_is_never_told():
    """What was left out, and the three ways to give it."""
    aggregator = LossAggregator(policy_losses, loss_agg_mode=MODE)
    with pytest.raises(LossAggError, match=r"not known yet: .*get_model_config\(model\), or a fun"):
        aggregator.begin_step([{"loss_mask": torch.ones(1, 2)}])


def _measured(layout, per_token, patched):
    host = Host(layout, per_token, contract="measure")
    config = unwrap(host.chunks[0]).config
    if patched:
        original = config.finalize_model_grads_func

        def finalize(chunks, *args, **kwargs):
            original(chunks, *args, **kwargs)
            for chunk in chunks:
                chunk.scale_gradients(2.0)

        config.finalize_model_grads_func = finalize
    forward_step, iterators = forward_step_of(host), host.iterators(0, 1)
    assert host.aggregator.must_measure
    steps = [host.train_step(forward_step, iterators) for _ in range(2)]
    assert not host.aggregator.must_measure
    return steps


@BOTH_REGIMES
@pytest.mark.parametrize("text", ["D=2 M=2", "PP=2 M=2"])
def test_measuring_where_a_trainer_owns_the_schedule(rank_pool, text, per_token):
    """When the first gradients are finalized, on every rank; the step goes on as it would."""
    layout = Layout.parse(text)
    results = rank_pool.run(_measured, layout, per_token, False, world_size=layout.world_size)
    for seed in (0, 1):
        _, expected = reference(rank_pool, seed)
        assert relative_error(results[0][seed][1], expected) < (1e-6 if per_token else 1e-12)
    with pytest.raises(RankFailure, match="a gradient arrives 2 times as large"):
        rank_pool.run(_measured, layout, per_token, True, world_size=layout.world_size)


def _deferred(layout, per_token):
    host = Host(layout, per_token, denominators="deferred", loss_agg_mode="seq-mean-token-sum")
    with pytest.raises(ValueError, match="eval_aggregator="):
        forward_step_of(host)
    counting = LossAggregator(
        policy_losses,
        loss_agg_mode="seq-mean-token-sum",
        model_config=unwrap(host.chunks[0]).config,
        weights_key="loss_mask",
        weight_dtype=torch.float64,
    )
    forward_step = forward_step_of(host, eval_aggregator=counting)
    training = host.iterators(0, 1)
    first = host.train_step(forward_step, training)
    number = layout.num_microbatches
    evaluated = host.evaluate(forward_step, host.iterators(2), 1, number)
    second = host.train_step(forward_step, training)
    return first, second, evaluated


def _sequence_sums(seed):
    from megatron_lossagg.testing.reference import reference_run

    batch = batch_of_seed(seed, Layout())
    return reference_run(Host.gpt, batch, policy_losses, "seq-mean-token-sum")


@BOTH_REGIMES
@pytest.mark.parametrize("text", ["D=2 M=2", "TP=2 PP=2 M=2"])
def test_deferred_denominators_need_a_counting_aggregator_for_evaluation(
    rank_pool, text, per_token
):
    """Refused when it is built; with one, both train and evaluate exactly, in turns."""
    layout = Layout.parse(text)
    results = rank_pool.run(_deferred, layout, per_token, world_size=layout.world_size)
    expected = [rank_pool.run(_sequence_sums, seed, world_size=1)[0] for seed in (0, 1, 2)]
    bound = 1e-6 if per_token else 1e-12
    for index in range(2):
        assert relative_error(results[0][index][1], expected[index][1]) < bound
        assert results[-1][index][0] == {NAME: pytest.approx(expected[index][0], rel=1e-12)}
    assert results[-1][2] == {NAME: pytest.approx(expected[2][0], rel=1e-5)}
