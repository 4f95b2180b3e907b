"""Megatron-LM: a `loss_func` and a `forward_step` for `pretrain(...)` or for a bare schedule.

The hook is the host's own: the `forward_step_func` that `pretrain` and every schedule take.
Replaces the two functions of the same names in `pretrain_gpt.py`; `get_batch` stays the script's:

    aggregator = LossAggregator(
        lambda output, batch: output,          # the model returns token losses when given labels
        loss_agg_mode="seq-mean-token-mean", model_config=config, weights_key="loss_mask",
    )
    pretrain(..., make_forward_step(aggregator, get_batch))

J = sum over the global batch of w * l. The weights w replace the batch's `loss_mask`, so they go
wherever Megatron-LM takes that field: over the tensor-parallel ranks by broadcast, over the
context-parallel ranks by slicing. The iterator is wrapped on the model chunk that computes the loss
alone, so there is one all-reduce per step, over the data-parallel group of the last stage. What the
host applies afterwards, and follows from its own files: the schedule and DDP (regimes R1 and R3 of
`megatron_lossagg.schedule`), and the sums of `train_step` and `evaluate` over the reported pairs.

Deliberately not done:

* Megatron-LM is not patched: no module, class or function of it is replaced. One thing is set: the
  first step makes `finalize_model_grads_func` of the model's config also run `aggregator.validate`,
  so that a fault raises before the optimizer steps.
* The checks of `loss_func` in `pretrain_gpt.py` for NaN and spikes wait for the device. Pass them
  as `check_loss` if you want them.
* Packed batches (`cu_seqlens`) need a `call_model` of yours, which knows your model's
  `packed_seq_params`. Full-iteration CUDA graphs are refused.
* `process_non_loss_data_func` makes Megatron-LM run the schedule on the last rank alone: counting
  would wait for the other ranks. Give it a forward step of its own, or use one data-parallel rank.
* `get_batch` of Megatron-LM receives `loss_mask` as float32: leave `weight_dtype` at that with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.aggregator import LossAggregator
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.schedule.refusals import uses_full_iteration_cuda_graph
from megatron_lossagg.step.microbatch_report import MicrobatchReport
from megatron_lossagg.weights.marks import valid_tokens
from megatron_lossagg.weights.microbatch import NumMicrobatches

from ._batches import Batch, named, with_vp_stage
from ._empty_steps import skip_empty_steps
from ._loss_streams import (
    LossStreams,
    Stream,
    evaluation_num_microbatches,
    training_num_microbatches,
)
from ._megatron import megatron
from ._tp_broadcast import broadcast_batch

__all__ = ["broadcast_batch", "make_forward_step", "make_loss_func", "skip_empty_steps"]

_WEIGHTS_KEY = "loss_mask"


def make_loss_func(
    aggregator: LossAggregator,
    *,
    name: str = "lm loss",
    check_loss: Callable[[Tensor], None] | None = None,
) -> Callable[..., Any]:
    """The `loss_func(loss_mask, output_tensor, model=None)` of `pretrain_gpt.py`.

    For a script that writes its own `forward_step`: bind the first argument with `partial`, and
    give the schedule `aggregator.wrap(data_iterator, ...)`. It neither communicates nor syncs.

    Args:
        aggregator: the plugin.
        name: the entry of the report.
        check_loss: called with the loss that is returned, before it is.

    Returns:
        loss_func(microbatch_or_loss_mask, output_tensor, model=None, non_loss_data=False). Its
        first argument is the tensor of weights that rode in `loss_mask`, or a dict that holds it
        under `aggregator.weights_key`; `loss_fn` gets that dict. It returns (loss, {name: pair})
        or, with calculate_per_token_loss, (loss, num_tokens, {name: pair}). `pair` is [numerator,
        denominator]: summed over microbatches and dp x cp, their quotient is J. With
        `non_loss_data` it returns the report alone.
    """

    def loss_func(
        microbatch_or_loss_mask: Any,
        output_tensor: Any,
        model: Any = None,
        non_loss_data: bool = False,
    ) -> Any:
        microbatch = microbatch_or_loss_mask
        if not isinstance(microbatch, Mapping):
            microbatch = {aggregator.weights_key: microbatch}
        result = aggregator.loss_func(microbatch, output_tensor, non_loss_data)
        if non_loss_data:
            return _for_host(result, name)
        *returned, report = result
        if check_loss is not None:
            check_loss(returned[0])
        return (*returned, _for_host(report, name))

    return loss_func


def _for_host(report: MicrobatchReport, name: str) -> MicrobatchReport:
    """[numerator, denominator] of the loss under `name`, and of every term and metric.

    While training also of minima and maxima, which the checks before the optimizer complete:
    train_step looks at them afterwards. evaluate() of Megatron-LM has no such place. Under --sft it
    divides each microbatch's pair and averages, with denominators clamped to 1: make them 1.
    """
    values = tuple(name if key == "loss" else key for key in report.names.values)
    host_report = report.renamed(report.names._replace(values=values))
    if torch.is_grad_enabled():
        host_report.add_extremes()
    else:
        host_report.divide_shares()
    return host_report


def make_forward_step(
    aggregator: LossAggregator,
    get_batch: Callable[..., Any],
    *,
    call_model: Callable[[Any, Batch], Any] | None = None,
    num_microbatches: NumMicrobatches | None = None,
    eval_num_microbatches: NumMicrobatches | None = None,
    batch_keys: Sequence[str] | None = None,
    check_loss: Callable[[Tensor], None] | None = None,
    name: str = "lm loss",
    iteration: Callable[[], int] | None = None,
    evaluation_average: str = "steps",
    eval_aggregator: LossAggregator | None = None,
) -> Callable[..., Any]:
    """The `forward_step(data_iterator, model)` of `pretrain_gpt.py`, for `pretrain` or a schedule.

    On the chunk that computes the loss it wraps the data iterator, once, and so starts one
    all-reduce per step over the data-parallel group. Training and evaluation are told apart by
    `model.training`, as Megatron-LM's `evaluate` sets it; the first training step after an
    evaluation also runs `aggregator.validate` on the evaluation's last step.

    Args:
        aggregator: the plugin, with weights_key="loss_mask". Built without `model_config`, it takes
            the model's own at the first step.
        get_batch: (data_iterator, vp_stage) or (data_iterator) -> a dict of tensors, or what
            Megatron-LM's `get_batch` returns: 5 values (to 0.15), 6 (0.16, 0.17) or 10 (since
            0.18). It takes its microbatch by one `next(data_iterator)`, except where that is None.
        call_model: (model, batch) -> output. Default: model(tokens, position_ids, attention_mask,
            labels=labels), with the 0/1 loss_mask for models with multi-token prediction. With
            `return_schedule_plan` it is given `model.build_schedule_plan` as model.
        num_microbatches: M of training, or a function that gives it; None asks
            `megatron.core.num_microbatches_calculator.get_num_microbatches`.
        eval_num_microbatches: M of evaluation; None takes what `evaluate` computes from
            Megatron-LM's arguments or, without those, the number for training.
        batch_keys: names of the values of `get_batch` if it returns another tuple.
        check_loss: see `make_loss_func`.
        name: the entry of the report. With "loss", `aggregator.report` reads what the schedule
            returns.
        iteration: gives the step's number, where a term's coefficient is a schedule.
        evaluation_average: what `evaluate` reports over its `eval_iters` global batches k, in both
            settings of `calculate_per_token_loss`: "steps", the mean of their J_k, or "tokens",
            sum_k T_k J_k / sum_k T_k, which is what Megatron-LM's own loss function gives for
            token-mean (without --sft, which averages over microbatches).
        eval_aggregator: the plugin for evaluation, where the one for training has deferred
            denominators and cannot evaluate; None: the same one.

    Returns:
        forward_step(data_iterator, model, return_schedule_plan=False).

    Raises:
        ValueError: weights do not ride in `loss_mask`, or denominators are deferred and there is
            no `eval_aggregator` that counts.
    """
    evaluating = aggregator if eval_aggregator is None else eval_aggregator
    for each in (aggregator, evaluating):
        if each.weights_key != _WEIGHTS_KEY:
            raise ValueError(
                f"make_forward_step needs LossAggregator(..., weights_key={_WEIGHTS_KEY!r}), the "
                "field that Megatron-LM broadcasts and slices; got "
                f"weights_key={each.weights_key!r}."
            )
    if aggregator.has_model_config:
        _check_evaluation(evaluating, evaluation_average)
    loss_funcs = {
        is_training: make_loss_func(each, name=name, check_loss=check_loss)
        for is_training, each in ((True, aggregator), (False, evaluating))
    }
    if num_microbatches is None:
        num_microbatches = training_num_microbatches
    if eval_num_microbatches is None:
        eval_num_microbatches = partial(evaluation_num_microbatches, num_microbatches)
    of_evaluation = {"forward_only": True, "evaluation_average": evaluation_average}
    streams = LossStreams(
        Stream(aggregator, num_microbatches, {"iteration": iteration}),
        Stream(evaluating, eval_num_microbatches, {"iteration": iteration, **of_evaluation}),
    )
    call_get_batch = with_vp_stage(get_batch)
    call_model = _call_gpt_model if call_model is None else call_model

    def forward_step(
        data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        get_attribute = megatron("megatron.core.utils", "get_attr_wrapped_model")
        config = megatron("megatron.core.utils", "get_model_config")(model)
        is_training = bool(model.training)
        for each in (aggregator, evaluating):
            each.use_model_config(config)
            _check_config(config, each)
        _check_evaluation(evaluating, evaluation_average)
        running = streams.aggregator(is_training)
        # The schedule reads this hook from the config of its first chunk, which may be a copy.
        running.install_finalize_hook(config)
        running.measure_at_first_step()
        computes_loss = get_attribute(model, "post_process")
        if computes_loss:
            data_iterator = streams.enter(data_iterator, is_training)
        batch = named(call_get_batch(data_iterator, model), batch_keys)
        if computes_loss:
            batch = running.with_shared_counts(batch)
        target = model.build_schedule_plan if return_schedule_plan else model
        loss_func = loss_funcs[is_training]
        return call_model(target, batch), partial(loss_func, batch, model=model)

    return forward_step


def _check_evaluation(evaluating: LossAggregator, evaluation_average: str) -> None:
    """Raise ValueError if Megatron-LM's `evaluate` would meet an aggregator that cannot."""
    if evaluating.denominators == "counted":
        return
    if not evaluating.can_evaluate or evaluation_average == "steps":
        raise ValueError(
            "make_forward_step got an aggregator with denominators='deferred', which knows counts "
            "when gradients are finalized, and Megatron-LM evaluates, too. Pass "
            "eval_aggregator=LossAggregator(..., denominators='counted') for evaluation. "
            "(Token-mean with calculate_per_token_loss on can evaluate with "
            "evaluation_average='tokens'.)"
        )


def _call_gpt_model(model: Any, batch: Batch) -> Any:
    """The call of `pretrain_gpt.py`: token losses [b, s] on the last stage."""
    if batch.get("cu_seqlens") is not None or batch.get("packed_seq_params") is not None:
        raise LossAggError(
            "The default model call takes padded rows [b, s]. Pass call_model=(model, batch) -> "
            "output that gives your model its packed_seq_params for batches with cu_seqlens."
        )
    options = {"labels": batch.get("labels")}
    owner = getattr(model, "__self__", model)
    config = megatron("megatron.core.utils", "get_model_config")(owner)
    if getattr(config, "mtp_num_layers", None) and batch.get(_WEIGHTS_KEY) is not None:
        # Multi-token prediction has a loss of its own, over the 0/1 mask: valid tokens, also those
        # to which a mode gives the weight 0.
        options["loss_mask"] = valid_tokens(batch[_WEIGHTS_KEY]).float()
    return model(
        batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), **options
    )


def _check_config(config: Any, aggregator: LossAggregator) -> None:
    """Raise where the model's config is not what the aggregator was told, or cannot be honoured."""
    per_token, told = (
        bool(getattr(c, "calculate_per_token_loss", False))
        for c in (config, aggregator.model_config)
    )
    if per_token != told:
        raise ValueError(
            f"The model's config has calculate_per_token_loss={per_token}, but the model_config "
            f"given to LossAggregator has {told}. Pass megatron.core.utils.get_model_config(model)."
        )
    if uses_full_iteration_cuda_graph(config):
        raise LossAggError(
            "Full-iteration CUDA graphs: forward_step would wrap the graph's static iterators. "
            "Give train_step aggregator.wrap(data_iterator, ...) and bind "
            "make_loss_func(aggregator) in a forward_step of your own."
        )
