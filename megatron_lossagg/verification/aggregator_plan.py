"""`LossAggregator` as a plan for `run_global_batch`: how a training script would use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregator import LossAggregator
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.schedule.cp_slicing import slice_for_cp
from megatron_lossagg.testing.model.model_chunks import model_output, token_log_probs
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg.testing.run import StepContext, StepPlan
from megatron_lossagg.verification.cp_conventions import FullRowLosses
from megatron_lossagg.verification.faults import planted

PLANNINGS = ("begin_step", "wrap")
DATA_PLACES = ("all", "tp-rank-0")


def policy_gradient_losses(logits: Tensor, microbatch: Mapping[str, Tensor]) -> Tensor:
    """-A * exp(log p - log p_old) per token, the unclipped policy-gradient loss. [b, s].

    Communicates over the tensor-parallel group, see `token_log_probs`.
    """
    log_ratio = token_log_probs(logits, microbatch["labels"]) - microbatch["old_log_probs"]
    return -microbatch["advantages"] * log_ratio.exp()


@dataclass(frozen=True)
class AggregatorPlan:
    """Plans a step with `LossAggregator`; picklable, so it can be sent to a `RankPool`.

    Attributes:
        loss_agg_mode, loss_scale_factor, norm_semantics, sequence_count, returns, denominators: of
            `LossAggregator`; deferred denominators need planning="wrap".
        cp_gradient: of `LossAggregator`; token losses are then made as it says, see
            `FullRowLosses`.
        planning: "begin_step", or "wrap" with the weights riding in `loss_mask`.
        data: who has microbatches: "all" ranks, or "tp-rank-0" of the first and last stage alone,
            the others get them by broadcast, as in Megatron-LM.
        token_losses: (logits, microbatch) -> [b, s].
        validate: run the checks after the schedule.
        fault: a fault to plant, see `faults`.
    """

    loss_agg_mode: str
    loss_scale_factor: float | None = None
    norm_semantics: str = "sum"
    sequence_count: str = "valid"
    cp_gradient: str = "local"
    returns: str = "auto"
    denominators: str = "counted"
    planning: str = "begin_step"
    data: str = "all"
    token_losses: Callable[[Tensor, Mapping[str, Tensor]], Tensor] = policy_gradient_losses
    weight_dtype: torch.dtype = torch.float64
    validate: bool = True
    fault: str | None = None

    def __call__(self, context: StepContext) -> StepPlan:
        """One all-reduce over the data-parallel group, now or at the schedule's first `next`."""
        self._check_packed(context)
        aggregator = self._aggregator(context.model_config)
        is_end_stage = context.pp_rank in (0, context.layout.pp - 1)
        has_data = self.data == "all" or (context.tp_rank == 0 and is_end_stage)
        num_microbatches = len(context.microbatches)
        fault = ExitStack()
        fault.enter_context(planted(self.fault))
        if self.planning == "wrap":
            step: Any = aggregator
            data_iterator: Any = aggregator.wrap(
                [iter(context.microbatches) if has_data else None for _ in context.chunks],
                num_microbatches=num_microbatches,
            )
        else:
            step = aggregator.begin_step(
                context.microbatches if has_data else None, num_microbatches=num_microbatches
            )
            data_iterator = step.data_iterator(len(context.chunks))

        def finish(store: list[Any]) -> dict[str, float]:
            fault.close()
            if self.validate:
                step.validate()
            if self.planning == "begin_step":
                return step.report(store)
            return _as_megatron_lm_reports(store)

        return StepPlan(
            partial(self._forward_step, step.loss_func), data_iterator, num_microbatches, finish
        )

    def _aggregator(self, model_config: Any) -> LossAggregator:
        token_losses = self.token_losses
        if self.cp_gradient != "local":
            token_losses = FullRowLosses(token_losses, self.cp_gradient)
        return LossAggregator(
            token_losses,
            loss_agg_mode=self.loss_agg_mode,
            model_config=model_config,
            loss_scale_factor=self.loss_scale_factor,
            norm_semantics=self.norm_semantics,
            sequence_count=self.sequence_count,
            cp_gradient=self.cp_gradient,
            returns=self.returns,
            denominators=self.denominators,
            weights_key="loss_mask" if self.planning == "wrap" else "loss_weights",
            weight_dtype=self.weight_dtype,
            checks="required" if self.validate else "skipped",
        )

    def _check_packed(self, context: StepContext) -> None:
        stages = context.layout.pp * context.layout.vpp
        is_packed = any("cu_seqlens" in microbatch for microbatch in context.microbatches)
        if is_packed and self.data == "tp-rank-0" and stages > 2:
            raise ValueError(
                "AggregatorPlan: packed microbatches need data='all' where there are middle stages "
                f"(layout '{context.layout}'), got data='tp-rank-0': a stage without data does not "
                "know the boundaries of the sequences, and attention needs them"
            )

    def _forward_step(
        self, loss_func: Callable[..., Any], data_iterator: Any, model: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        chunk = unwrap(model)
        batch = None if data_iterator is None else next(data_iterator)
        if self.data == "tp-rank-0" and (chunk.pre_process or chunk.post_process):
            batch = _broadcast_over_tp(batch)
        if batch is None:
            return model(None, None, None), partial(loss_func, {})
        part = slice_for_cp(batch)
        return model_output(model, part), partial(
            loss_func, part if self.cp_gradient == "local" else batch
        )


def _broadcast_over_tp(batch: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """The batch of tensor-parallel rank 0 on all of them (a broadcast over the tp group)."""
    tp_group = ParallelGroups.from_megatron().tp
    box = [batch]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(tp_group)[0], group=tp_group)
    assert box[0] is not None
    return box[0]


def _as_megatron_lm_reports(store: list[Any]) -> dict[str, float]:
    """Numerator over denominator, summed as Megatron-LM's train_step does; {} on earlier stages.

    Communicates over the data x context parallel group of the last stage.
    """
    groups = ParallelGroups.from_megatron()
    if not groups.is_last_stage:
        return {}
    total = torch.stack([entry["loss"].double() for entry in store]).sum(dim=0)
    dist.all_reduce(total, group=groups.dp_cp)
    numerator, denominator = total.tolist()
    return {"loss": numerator / denominator if denominator else 0.0}
