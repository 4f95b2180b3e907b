"""Property: not only one step. Twenty optimizer steps end at the same parameters in any layout."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.testing.batch.global_batch import GlobalBatch, ragged_batch
from megatron_lossagg.testing.gradients import relative_error, whole_model_parameters
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import build_model_chunks, token_log_probs
from megatron_lossagg.testing.model.parameter_names import named_parameters, unwrap
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.reference import reference_gradient, reference_loss
from megatron_lossagg.testing.run import run_global_batch
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan, policy_gradient_losses

LONG = pytest.mark.conformance  # `make conformance`

NUM_STEPS = 20
GPT = TinyGPT(num_layers=2, init_std=0.1)
FIELDS = ("advantages", "old_log_probs")


def rollouts(step: int) -> GlobalBatch:
    """Another ragged batch for every step, with other token counts."""
    return ragged_batch(16, dp=2, num_microbatches=4, extra_fields=FIELDS, seed=step)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def train_in_one_process(loss_agg_mode, options):
    """Plain autograd on the whole batch; no schedule, no DDP, nothing of the plugin."""
    [model] = build_model_chunks(GPT, Layout(), wrap_with_ddp=False)
    optimizer = adam(model.parameters())
    losses = []
    for step in range(NUM_STEPS):
        rows = rollouts(step).rows
        optimizer.zero_grad()
        logits = model(rows["tokens"], rows["position_ids"], None)
        token_losses = policy_gradient_losses(logits, rows)
        loss = reference_loss(token_losses, rows["loss_mask"], loss_agg_mode, **options)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in named_parameters(model)}


def train_in_a_layout(layout, loss_agg_mode, options, per_token):
    """The plugin through Megatron's schedule and DDP; Adam on `main_grad`."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = build_model_chunks(GPT, layout, calculate_per_token_loss=per_token)
    aggregator = LossAggregator(
        policy_gradient_losses,
        loss_agg_mode=loss_agg_mode,
        model_config=unwrap(chunks[0]).config,
        weight_dtype=torch.float64,
        **options,
    )
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizer = adam(parameters)
    losses = []
    for number in range(NUM_STEPS):
        batch = rollouts(number)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        step = aggregator.begin_step(batch.microbatches(parallel_state.get_data_parallel_rank()))

        def forward_step(data_iterator, model, step=step):
            microbatch = slice_for_cp(next(data_iterator))
            logits = model(microbatch["tokens"], microbatch["position_ids"], None)
            return logits, partial(step.loss_func, microbatch)

        store = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=step.data_iterator(len(chunks)),
            model=chunks,
            num_microbatches=step.num_microbatches,
            seq_length=batch.width,
            micro_batch_size=2,
        )
        step.validate()
        losses.append(step.report(store)["loss"])
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # DDP adds what it finds there to main_grad
    return losses, whole_model_parameters(chunks)


NORM = {"loss_scale_factor": 16.0}


@pytest.mark.parametrize(
    ("loss_agg_mode", "options", "per_token"),
    [
        pytest.param("token-mean", {}, False, marks=LONG),
        pytest.param("token-mean", {}, True, id="token-mean-R3"),
        pytest.param("seq-mean-token-mean", {}, False, id="seq-mean-token-mean-R1"),
        pytest.param("seq-mean-token-mean", {}, True, marks=LONG),
        pytest.param("seq-mean-token-sum-norm", NORM, False, marks=LONG),
        pytest.param("seq-mean-token-sum-norm", NORM, True, marks=LONG),
    ],
)
def test_twenty_steps_end_at_the_same_parameters(rank_pool, loss_agg_mode, options, per_token):
    """PP=2 x D=2, M=4 against one process: parameters to 1e-9 (R3: 1e-5), every loss as close."""
    layout = Layout(pp=2, dp=2, num_microbatches=4)
    [(expected_losses, expected)] = rank_pool.run(
        train_in_one_process, loss_agg_mode, options, world_size=1
    )
    results = rank_pool.run(
        train_in_a_layout, layout, loss_agg_mode, options, per_token, world_size=4
    )
    bound = 1e-5 if per_token else 1e-9
    start = rank_pool.run(_initial_parameters, world_size=1)[0]
    assert relative_error(expected, start) > 0.1, "training must have moved the parameters"
    for losses, parameters in results:
        assert relative_error(parameters, expected) <= bound
        assert losses == pytest.approx(expected_losses, rel=bound * 100, abs=bound)


def _initial_parameters():
    [model] = build_model_chunks(GPT, Layout(), wrap_with_ddp=False)
    return {name: p.detach().clone() for name, p in named_parameters(model)}


# bfloat16: token losses computed from bfloat16 logits, as a bfloat16 model gives them.


def bfloat16_losses(logits, microbatch):
    log_probs = token_log_probs(logits.bfloat16(), microbatch["labels"])
    log_ratio = log_probs - microbatch["old_log_probs"].bfloat16()
    return -microbatch["advantages"].bfloat16() * log_ratio.exp()


def naive_bfloat16_token_mean(logits, rows):
    """What one would write in one process: multiply by the mask, sum, divide, all in bfloat16."""
    mask = rows["loss_mask"].bfloat16()
    return (bfloat16_losses(logits, rows) * mask).sum() / mask.sum()


def float64_token_mean(logits, rows):
    return reference_loss(policy_gradient_losses(logits, rows), rows["loss_mask"], "token-mean")


@LONG
def test_bfloat16_is_no_worse_than_a_naive_loss(rank_pool):
    """Over ten batches: the errors against float64, of J and of the gradient, are no larger."""
    layout = Layout(pp=2, dp=2, num_microbatches=4)
    plan = AggregatorPlan("token-mean", token_losses=bfloat16_losses, weight_dtype=torch.float32)
    ours, naive = [], []
    for step in range(10):
        batch = rollouts(step)
        # Advantages of one sign: a J near 0 would only show the rounding of the tokens.
        batch.rows["advantages"].abs_()
        [(truth, true_gradient)] = rank_pool.run(
            reference_gradient, GPT, batch, float64_token_mean, world_size=1
        )
        [(loss, gradient)] = rank_pool.run(
            reference_gradient, GPT, batch, naive_bfloat16_token_mean, world_size=1
        )
        naive.append((abs(loss - truth), relative_error(gradient, true_gradient)))
        results = rank_pool.run(run_global_batch, batch, layout, plan, gpt=GPT, world_size=4)
        loss, gradient = results[0].report["loss"], results[0].gradients
        ours.append((abs(loss - truth), relative_error(gradient, true_gradient)))
    our_loss, our_gradient = torch.tensor(ours).mean(dim=0).tolist()
    naive_loss, naive_gradient = torch.tensor(naive).mean(dim=0).tolist()
    assert our_loss <= naive_loss, (our_loss, naive_loss)
    assert our_gradient <= naive_gradient * (1 + 1e-6), (our_gradient, naive_gradient)
    assert naive_gradient > 1e-4, "bfloat16 must have been used"
