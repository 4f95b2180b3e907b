"""Megatron-LM: a `loss_func` and a `forward_step` for `pretrain(...)` or for a bare schedule.

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

* Megatron-LM is not patched. One thing is set: the first step makes `finalize_model_grads_func` of
  the model's config also run `aggregator.validate`, so that a fault raises before the optimizer
  steps.
* The checks of `loss_func` in `pretrain_gpt.py` for NaN and spikes wait for the device. Pass them
  as `check_loss` if you want them.
* Packed batches (`cu_seqlens`) need a `call_model` of yours, which knows your model's
  `packed_seq_params`. Full-iteration CUDA graphs are refused.
* `process_non_loss_data_func` makes Megatron-LM run the schedule on the last rank alone: counting
  would wait for the other ranks. Give it a forward step of its own, or use one data-parallel rank.
* `get_batch` of Megatron-LM receives `loss_mask` as float32: leave `weight_dtype` at that with it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatron_lossagg.aggregator import LossAggregator
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.refusals import uses_full_iteration_cuda_graph
from megatron_lossagg.report import MicrobatchReport
from megatron_lossagg.stream import NumMicrobatches

from .tp_broadcast import broadcast_batch

__all__ = ["broadcast_batch", "make_forward_step", "make_loss_func"]

# What `get_batch` of `pretrain_gpt.py` returns, by the number of its values.
_BATCH_KEYS = {
    # Up to Core 0.15.
    5: ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"),
    # 0.16 and 0.17.
    6: ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params"),
    # Since 0.18, its BATCH_KEYS.
    10: (
        "attention_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
        "hybrid_cp_group",
        "labels",
        "local_cp_size",
        "loss_mask",
        "max_seqlen",
        "position_ids",
        "tokens",
    ),
}
_WEIGHTS_KEY = "loss_mask"

Batch = Mapping[str, Any]


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
            return _named_pairs(result, name)
        *returned, report = result
        if len(returned) == 1:
            # evaluate() of Megatron-LM clamps denominators to 1 under --sft: make them 1.
            report.packed /= report.packed[:, 1:].clone()
        if check_loss is not None:
            check_loss(returned[0])
        return (*returned, _named_pairs(report, name))

    return loss_func


def _named_pairs(report: MicrobatchReport, name: str) -> MicrobatchReport:
    """[numerator, denominator] of the loss under `name`, and of every term and metric."""
    names = [name if key == "loss" else key for key in report]
    return MicrobatchReport(names, report.packed, report.extremes)


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
) -> Callable[..., Any]:
    """The `forward_step(data_iterator, model)` of `pretrain_gpt.py`, for `pretrain` or a schedule.

    On the chunk that computes the loss it wraps the data iterator, once, and so starts one
    all-reduce per step over the data-parallel group. Training and evaluation are told apart by
    `model.training`, as Megatron-LM's `evaluate` sets it; the first training step after an
    evaluation also runs `aggregator.validate` on the evaluation's last step.

    Args:
        aggregator: the plugin, with weights_key="loss_mask".
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

    Returns:
        forward_step(data_iterator, model, return_schedule_plan=False).

    Raises:
        ValueError: the aggregator's weights do not ride in `loss_mask`.
    """
    if aggregator.weights_key != _WEIGHTS_KEY:
        raise ValueError(
            f"make_forward_step needs LossAggregator(..., weights_key={_WEIGHTS_KEY!r}), the field "
            f"that Megatron-LM broadcasts and slices; got weights_key={aggregator.weights_key!r}."
        )
    loss_func = make_loss_func(aggregator, name=name, check_loss=check_loss)
    if num_microbatches is None:
        num_microbatches = _get_num_microbatches
    if eval_num_microbatches is None:
        eval_num_microbatches = partial(_eval_num_microbatches, num_microbatches)
    streams = _LossStreams(aggregator, num_microbatches, eval_num_microbatches, iteration)
    call_get_batch = _with_vp_stage(get_batch)
    call_model = _call_gpt_model if call_model is None else call_model

    def forward_step(
        data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        get_attribute = _megatron("megatron.core.utils", "get_attr_wrapped_model")
        config = _megatron("megatron.core.utils", "get_model_config")(model)
        _check_config(config, aggregator)
        # The schedule reads this hook from the config of its first chunk, which may be a copy.
        aggregator.install_finalize_hook(config)
        if get_attribute(model, "post_process"):
            data_iterator = streams.enter(data_iterator, bool(model.training))
        batch = _named(call_get_batch(data_iterator, model), batch_keys)
        target = model.build_schedule_plan if return_schedule_plan else model
        return call_model(target, batch), partial(loss_func, batch, model=model)

    return forward_step


class _LossStreams:
    """The loss chunk's iterators on this rank: one wrapped for training, one for evaluation."""

    def __init__(
        self,
        aggregator: LossAggregator,
        num_microbatches: NumMicrobatches,
        eval_num_microbatches: NumMicrobatches,
        iteration: Callable[[], int] | None,
    ) -> None:
        self._aggregator = aggregator
        self._iteration = iteration
        self._num_microbatches = {True: num_microbatches, False: eval_num_microbatches}
        self._is_training = True
        self._wrapped: dict[bool, tuple[Any, Any]] = {}
        self._is_without_data = False

    def enter(self, data_iterator: Any, is_training: bool) -> Any:
        """The wrapped iterator, or None on a rank without data; called once per microbatch."""
        if is_training and not self._is_training:
            # A schedule that runs forward only has no finalize hook: check its last step here.
            self._aggregator.validate()
        self._is_training = is_training
        if self._aggregator.must_measure:
            raise LossAggError(
                "contract='measure' with make_forward_step: only ranks of the last stage plan a "
                "step, but measuring takes all ranks. Call aggregator.measure(model=model) on "
                "every rank before training."
            )
        if data_iterator is None:
            self._enter_without_data()
            return None
        raw, wrapped = self._wrapped.get(is_training, (None, None))
        if raw is not data_iterator:
            number = self._num_microbatches[is_training]
            wrapped = self._aggregator.wrap(
                data_iterator, num_microbatches=number, iteration=self._iteration
            )
            # Only the latest is kept: between steps a wrapped iterator holds nothing back.
            self._wrapped[is_training] = (data_iterator, wrapped)
        return wrapped

    def _enter_without_data(self) -> None:
        if self._is_without_data:
            return
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            raise LossAggError(
                "forward_step got no data iterator on tensor-parallel rank 0 of the chunk that "
                "computes the loss, where tokens are counted. Give this rank its data; other "
                "tensor-parallel ranks may have None."
            )
        self._aggregator.wrap(
            None, num_microbatches=self._current_num_microbatches, iteration=self._iteration
        )
        self._is_without_data = True

    def _current_num_microbatches(self) -> int:
        number = self._num_microbatches[self._is_training]
        return number() if callable(number) else number


def _named(batch: Any, batch_keys: Sequence[str] | None) -> Batch:
    """What `get_batch` returned, as a dict."""
    if batch is None:
        return {}
    if isinstance(batch, Mapping):
        return batch
    values = tuple(batch)
    keys = _BATCH_KEYS.get(len(values)) if batch_keys is None else tuple(batch_keys)
    if keys is None or len(keys) != len(values):
        known = ", ".join(map(str, _BATCH_KEYS)) if keys is None else str(len(keys))
        raise ValueError(
            f"get_batch returned {len(values)} values, expected a dict or {known} values. Pass "
            "batch_keys=(...) with a name for each; the loss mask must be called 'loss_mask'."
        )
    return dict(zip(keys, values, strict=True))


def _with_vp_stage(get_batch: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """`get_batch` as a function of iterator and model; up to 0.14 it took no `vp_stage`."""
    try:
        parameters = list(inspect.signature(get_batch).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = [p.kind for p in parameters if p.kind is not p.KEYWORD_ONLY]
    takes_stage = len(kinds) != 1 or kinds[0] is inspect.Parameter.VAR_POSITIONAL

    def call(data_iterator: Any, model: Any) -> Any:
        if not takes_stage:
            return get_batch(data_iterator)
        get_attribute = _megatron("megatron.core.utils", "get_attr_wrapped_model")
        try:
            vp_stage = get_attribute(model, "vp_stage")
        except RuntimeError:
            vp_stage = None
        return get_batch(data_iterator, vp_stage)

    return call


def _call_gpt_model(model: Any, batch: Batch) -> Any:
    """The call of `pretrain_gpt.py`: token losses [b, s] on the last stage."""
    if batch.get("cu_seqlens") is not None or batch.get("packed_seq_params") is not None:
        raise LossAggError(
            "The default model call takes padded rows [b, s]. Pass call_model=(model, batch) -> "
            "output that gives your model its packed_seq_params for batches with cu_seqlens."
        )
    options = {"labels": batch.get("labels")}
    owner = getattr(model, "__self__", model)
    config = _megatron("megatron.core.utils", "get_model_config")(owner)
    if getattr(config, "mtp_num_layers", None) and batch.get(_WEIGHTS_KEY) is not None:
        # Multi-token prediction has a loss of its own, over the 0/1 mask.
        options["loss_mask"] = (batch[_WEIGHTS_KEY] != 0).float()
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


def _get_num_microbatches() -> int:
    module = "megatron.core.num_microbatches_calculator"
    return _megatron(module, "get_num_microbatches")()


def _eval_num_microbatches(num_microbatches: NumMicrobatches) -> int:
    """What `evaluate` of Megatron-LM runs; without its arguments the number for training."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None:
        return num_microbatches() if callable(num_microbatches) else num_microbatches
    batch_size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    micro_batch_size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    num_peers = args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
    return batch_size // (micro_batch_size * num_peers)


def _megatron(module: str, symbol: str) -> Any:
    """A symbol of Megatron-Core, imported when it is first needed."""
    try:
        return getattr(importlib.import_module(module), symbol)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"megatron_lossagg_plugin.megatron_lm looked for {module}.{symbol} and did not find "
            f"it: {error}. Install megatron-core 0.12 or newer."
        ) from error
