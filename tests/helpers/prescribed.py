"""Run prescribed token losses and masks through the real schedules, and return what arrives.

The model is `scalar_model`: the gradient of each stage's parameter is J, so one number per stage
tells whether the right objective reached the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.scalar_model import build_scalar_chunks
from megatron_lossagg.testing.run import StepPlan, run_global_batch
from megatron_lossagg.verification.cp_conventions import FullRowLosses


def batch_of(losses, mask, assignment, **fields) -> GlobalBatch:
    """Rows of token losses and masks, spread as `assignment` says."""
    rows = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "loss_mask": torch.tensor(mask, dtype=torch.int64),
        **{name: torch.tensor(values) for name, values in fields.items()},
    }
    return GlobalBatch(rows, assignment)


def even(num_rows: int, dp: int, num_microbatches: int):
    """Rows in order, the same number in every microbatch."""
    size = num_rows // (dp * num_microbatches)
    assert size * dp * num_microbatches == num_rows
    rows = iter(range(num_rows))
    return tuple(
        tuple(tuple(next(rows) for _ in range(size)) for _ in range(num_microbatches))
        for _ in range(dp)
    )


def prescribed_losses(output, microbatch):
    """The batch's losses times the output, which is 1; NaN and inf are added as constants.

    A product with NaN would make the gradient with respect to the output NaN before the plugin can
    select it away: masking what it computes from is the duty of a `loss_fn`.
    """
    losses = microbatch["losses"]
    return output * losses.nan_to_num(0, 0, 0) + (losses - losses.nan_to_num(0, 0, 0))


@dataclass(frozen=True)
class Prescribed:
    """A plan for `run_global_batch` on scalar chunks."""

    loss_agg_mode: str
    options: tuple = ()
    planning: str = "begin_step"
    num_microbatches_told: int | None = None

    def __call__(self, context, *, num_units=None) -> StepPlan:
        cp_gradient = dict(self.options).get("cp_gradient", "local")
        is_local = cp_gradient == "local"
        aggregator = LossAggregator(
            prescribed_losses if is_local else FullRowLosses(prescribed_losses, cp_gradient),
            loss_agg_mode=self.loss_agg_mode,
            model_config=context.model_config,
            weights_key="loss_mask" if self.planning == "wrap" else "loss_weights",
            weight_dtype=torch.float64,
            **dict(self.options),
        )
        num_microbatches = self.num_microbatches_told or len(context.microbatches)
        if self.planning == "wrap":
            data = aggregator.wrap(
                [iter(context.microbatches) for _ in context.chunks],
                num_microbatches=num_microbatches,
                num_units=num_units,
            )
            loss_func = aggregator.loss_func
        else:
            step = aggregator.begin_step(
                context.microbatches[:num_microbatches], num_units=num_units
            )
            data = step.data_iterator(len(context.chunks))
            loss_func = step.loss_func

        def forward_step(data_iterator, model):
            microbatch = next(data_iterator)
            part = slice_for_cp(microbatch)
            return model(part["loss_mask"]), partial(loss_func, part if is_local else microbatch)

        def finish(store):
            if self.planning == "wrap":
                return {}
            if not context.forward_only:
                step.validate()
            report = step.report(store)
            return {**report, "is_empty": step.is_empty}

        return StepPlan(forward_step, data, len(context.microbatches), finish)


def run_on_rank(batch, layout, plan, per_token, run_options):
    """On each rank: (gradient of every stage's parameter on rank 0, report, forward_data_store)."""
    chunks = build_scalar_chunks(layout, calculate_per_token_loss=per_token)
    result = run_global_batch(batch, layout, plan, chunks=chunks, **run_options)
    gradients = result.gradients and {n: g.item() for n, g in result.gradients.items()}
    return gradients, result.report, result.forward_data_store


def run(pool, batch, layout: str | Layout, mode: str, *, per_token=False, plan=None, **options):
    """(gradients by stage, J as reported by every rank) of one step through the real schedule."""
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    run_options = {
        k: options.pop(k) for k in ("forward_only", "collect_non_loss_data") if k in options
    }
    plan = plan or Prescribed(mode, tuple(sorted(options.items())))
    results = pool.run(
        run_on_rank, batch, layout, plan, per_token, run_options, world_size=layout.world_size
    )
    return results[0][0], [report for _, report, _ in results]


def assert_step(pool, batch, layout, mode, expected, *, per_token=False, **options):
    """Reported loss on every rank, and the gradient of every stage, are `expected`."""
    gradients, reports = run(pool, batch, layout, mode, per_token=per_token, **options)
    where = f"{mode} in {layout}, calculate_per_token_loss={per_token}"
    for report in reports:
        assert abs(report["loss"] - expected) <= 1e-12 * max(1, abs(expected)), (where, report)
    if options.get("forward_only"):
        assert gradients is None
        return
    # Megatron divides by the token count in float32.
    bound = (1e-6 if per_token else 1e-12) * max(1, abs(expected))
    for name, gradient in gradients.items():
        assert abs(gradient - expected) <= bound, (where, name, gradient, expected)
