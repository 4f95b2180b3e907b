"""Check a loss of your own on the real Megatron-Core, without a GPU: prints about 3e-16."""

from functools import partial

import torch

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg import testing as bench


def token_losses(logits, microbatch):  # [b, s], one loss per token, nothing reduced
    log_probs = bench.token_log_probs(logits, microbatch["labels"])
    ratio = (log_probs - microbatch["old_log_probs"]).exp()
    advantages = microbatch["advantages"]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def my_plan(context):  # on every rank: what your training step does
    aggregator = LossAggregator(
        token_losses,
        loss_agg_mode="token-mean",
        model_config=context.model_config,
        weight_dtype=torch.float64,
    )
    step = aggregator.begin_step(context.microbatches)

    def forward_step(data_iterator, model):
        microbatch = slice_for_cp(next(data_iterator))
        logits = model(microbatch["tokens"], microbatch["position_ids"], None)
        return logits, partial(step.loss_func, microbatch)

    def finish(forward_data_store):
        step.validate()
        return step.report(forward_data_store)

    iterators = step.data_iterator(len(context.chunks))
    return bench.StepPlan(forward_step, iterators, step.num_microbatches, finish)


def my_objective(logits, rows):  # what it should be: one process, the whole batch, plain torch
    mask = rows["loss_mask"] > 0
    return token_losses(logits, rows)[mask].sum() / mask.sum()


if __name__ == "__main__":
    layout = bench.Layout.parse("PP=2 D=2 M=4")
    fields = ("advantages", "old_log_probs")
    batch = bench.ragged_batch(16, dp=2, num_microbatches=4, extra_fields=fields)
    with bench.RankPool(layout.world_size) as pool:
        [result, *_] = pool.run(bench.run_global_batch, batch, layout, my_plan)
        [(value, expected), *_] = pool.run(
            bench.reference_gradient, bench.TinyGPT(), batch, my_objective
        )
    print(result.report["loss"], value)
    print(bench.relative_error(result.gradients, expected))
