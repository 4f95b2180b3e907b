"""One step of a model with losses of its own, with the plugin and with a `loss_func` by hand.

Megatron adds the losses of MoE routers and of multi-token prediction itself. What they leave in the
gradient is seen alone when the main loss is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_lossagg import LossAggregator, LossTerm, slice_for_cp
from megatron_lossagg.testing.run import StepPlan, run_global_batch
from megatron_lossagg.weights.marks import valid_tokens
from megatron_lossagg_plugin.megatron_lm import make_forward_step

# Every mode, with what it needs. Units are rows that are next to each other, see `with_units`.
MODES = (
    ("token-mean", {}),
    ("token-sum", {}),
    ("seq-mean-token-sum", {}),
    ("seq-mean-token-mean", {}),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 7.5}),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 7.5, "norm_semantics": "seq-mean"}),
    ("unit-mean-token-mean", {}),
    ("unit-mean-seq-mean-token-mean", {}),
)


def call_model(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Logits [b, s, vocab / TP]; token losses [b, s] of a model with multi-token prediction."""
    options = {}
    if getattr(model.config, "mtp_num_layers", None):
        # Its loss is over the 0/1 mask, also where weights ride in this field.
        mask = batch["loss_mask"]
        is_valid = valid_tokens(mask) if mask.is_floating_point() else mask != 0
        options = {"labels": batch["labels"], "loss_mask": is_valid.float()}
    return model(batch["tokens"], batch["position_ids"], None, **options)


@dataclass(frozen=True)
class ByHand:
    """No plugin: the main loss is zero, returned as the regime of the model's config wants it."""

    token_losses: Callable[..., torch.Tensor]
    grad_scale: float | None = None

    def __call__(self, context):
        set_grad_scale(context, self.grad_scale)
        returns_num_tokens = context.model_config.calculate_per_token_loss
        iterators = [iter(context.microbatches) for _ in context.chunks]

        def loss_func(batch, output):
            mask = batch["loss_mask"] > 0
            zero = 0 * torch.where(mask, self.token_losses(output, batch), 0.0).sum()
            return (zero, mask.sum(dtype=torch.int32), {}) if returns_num_tokens else (zero, {})

        def forward_step(data_iterator, model):
            batch = slice_for_cp(next(data_iterator))
            return call_model(model, batch), partial(loss_func, batch)

        data = iterators if len(iterators) > 1 else iterators[0]
        return StepPlan(forward_step, data, context.layout.num_microbatches)


@dataclass(frozen=True)
class WithPlugin:
    """`LossAggregator`, with all its checks; `factor` multiplies the token losses.

    `planning` is "begin_step", "wrap", or "adapter" for the Megatron-LM adapter. With a `mask_key`
    the objective is a term with that mask.
    """

    token_losses: Callable[..., torch.Tensor]
    loss_agg_mode: str
    options: tuple = ()
    factor: float = 0.0
    planning: str = "begin_step"
    returns: str = "auto"
    grad_scale: float | None = None
    mask_key: str | None = None

    def objective(self):
        def loss_fn(output, batch):
            return self.factor * self.token_losses(output, batch)

        options = dict(self.options)
        if self.mask_key is None:
            return {"loss_fn": loss_fn, "loss_agg_mode": self.loss_agg_mode, **options}
        term = LossTerm("term", loss_fn, self.loss_agg_mode, mask_key=self.mask_key, **options)
        return {"terms": [term]}

    def __call__(self, context):
        set_grad_scale(context, self.grad_scale)
        aggregator = LossAggregator(
            model_config=context.model_config,
            returns=self.returns,
            weights_key="loss_weights" if self.planning == "begin_step" else "loss_mask",
            weight_dtype=torch.float64,
            **self.objective(),
        )
        num_microbatches = context.layout.num_microbatches
        data = [iter(context.microbatches) for _ in context.chunks]
        if self.planning == "adapter":
            forward_step = make_forward_step(
                aggregator,
                lambda data_iterator: slice_for_cp(next(data_iterator)),
                num_microbatches=num_microbatches,
            )
            return StepPlan(forward_step, data if len(data) > 1 else data[0], num_microbatches)
        if self.planning == "wrap":
            step = aggregator
            data = aggregator.wrap(data, num_microbatches=num_microbatches)
        else:
            units = num_units(context) if self.loss_agg_mode.startswith("unit") else None
            step = aggregator.begin_step(context.microbatches, num_units=units)
            data = step.data_iterator(len(context.chunks))

        def forward_step(data_iterator, model):
            batch = slice_for_cp(next(data_iterator))
            return call_model(model, batch), partial(step.loss_func, batch)

        return StepPlan(forward_step, data, num_microbatches, partial(checked_report, step))


def deferred(token_losses):
    """What R3 also allows: counts that are known at the end."""
    options = (("denominators", "deferred"),)
    return WithPlugin(token_losses, "token-mean", options, planning="wrap")


def checked_report(step, store):
    step.validate()
    return step.report(store)["loss"]


def set_grad_scale(context, grad_scale):
    """The loss scaling of fp16 training, as Megatron's optimizer sets it."""
    if grad_scale is not None:
        context.model_config.grad_scale_func = lambda loss: loss * grad_scale


def num_units(context):
    return context.layout.dp * context.layout.num_microbatches


def with_units(batch):
    """The rows of a microbatch are a unit."""
    unit_ids = torch.zeros(batch.num_rows, dtype=torch.int64)
    microbatches = [rows for rank in batch.assignment for rows in rank]
    for unit, rows in enumerate(microbatches):
        unit_ids[list(rows)] = unit
    return type(batch)({**batch.rows, "unit_ids": unit_ids}, batch.assignment)


def run_plans(batch, layout, gpt, per_token, plans, **options):
    """On each rank: (gradient of the whole model on rank 0, report) of every plan."""
    results = [
        run_global_batch(
            batch, layout, plan, gpt=gpt, calculate_per_token_loss=per_token, **options
        )
        for plan in plans
    ]
    return [(result.gradients, result.report) for result in results]


def norm(gradients, part=""):
    """L2 norm over the parameters whose name contains `part`; 0 if there are none."""
    squares = [g.square().sum() for name, g in gradients.items() if part in name]
    return torch.stack(squares).sum().sqrt().item() if squares else 0.0
