"""Run one global batch through the real Megatron schedule, DDP and finalize, on this rank.

Made for `RankPool`:

    results = pool.run(run_global_batch, batch, layout, plan, world_size=layout.world_size)
    results[0].gradients                     # of the whole model, whatever the layout
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.batch.packed_batch import PackedBatch
from megatron_lossagg.testing.fits import check_fits
from megatron_lossagg.testing.gradients import whole_model_gradient
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import build_model_chunks, set_config_hooks
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.ranks.parallel import (
    current_device,
    initialize_model_parallel,
    objects_of_current_layout,
)

_DEFAULT_GPT = TinyGPT()


@dataclass(frozen=True)
class StepContext:
    """What a plan may look at, on one rank.

    Attributes:
        layout: of this run.
        gpt: of this run.
        chunks: this rank's model chunks, in DDP.
        model_config: their `TransformerConfig`.
        microbatches: this data-parallel rank's microbatches at full width, not sliced for context
            parallelism; its own copies.
        forward_only: whether the schedule will skip the backward passes.
        dp_rank: pure data-parallel rank.
        cp_rank: context-parallel rank.
        tp_rank: tensor-parallel rank.
        pp_rank: pipeline rank.
    """

    layout: Layout
    gpt: TinyGPT
    chunks: list[Any]
    model_config: Any
    microbatches: list[dict[str, torch.Tensor]]
    forward_only: bool
    dp_rank: int
    cp_rank: int
    tp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class StepPlan:
    """What a plan hands to the schedule.

    Attributes:
        forward_step_func: Megatron's forward_step(data_iterator, model).
        data_iterator: an iterator; with virtual stages, a list with one for each chunk.
        num_microbatches: what the schedule is told.
        finish: called with the schedule's forward_data_store before gradients are gathered, on
            every rank; its result is the run's report.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    num_microbatches: int
    finish: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True)
class RunResult:
    """What a run gives on one rank.

    Attributes:
        gradients: global parameter name -> full tensor; on rank 0 of a run with backward passes,
            None elsewhere.
        forward_data_store: what the schedule returned, detached and on the CPU; empty on ranks
            without the last stage.
        report: the result of `StepPlan.finish`, detached and on the CPU.
    """

    gradients: dict[str, torch.Tensor] | None
    forward_data_store: list[Any]
    report: Any


def run_global_batch(
    batch: GlobalBatch | PackedBatch,
    layout: Layout,
    plan_step: Callable[[StepContext], StepPlan],
    *,
    gpt: TinyGPT = _DEFAULT_GPT,
    calculate_per_token_loss: bool = False,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    use_distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    ddp_overrides: Mapping[str, Any] | None = None,
    chunks: list[Any] | None = None,
    replica_tolerance: float = 0.0,
) -> RunResult:
    """Communicates over all groups of `layout`: one step of Megatron, without the optimizer.

    Models are kept as long as the groups of their layout, and start each run with zero gradients
    and the config's hooks as Megatron sets them.

    Args:
        batch: assigned to `layout.dp` ranks and `layout.num_microbatches` microbatches; padded rows
            or packed sequences.
        layout: made current by this call.
        plan_step: called once on every rank; gives the forward step and its data.
        gpt: the model, unless `chunks` is given.
        calculate_per_token_loss: Megatron's flag of that name.
        forward_only: run the schedule so, without gradients.
        collect_non_loss_data: run the schedule so.
        use_distributed_optimizer: DDP leaves each rank its shard of the gradient.
        overlap_grad_reduce: DDP reduces buckets during the backward passes.
        ddp_overrides: more fields of `DistributedDataParallelConfig`.
        chunks: the caller's own chunks in DDP, instead of those of `gpt`; their config's hooks are
            left as they are.
        replica_tolerance: see `whole_model_gradient`.

    Returns:
        Gradients of the whole model on rank 0, and what the plan reported.

    Raises:
        ValueError: batch, layout and model don't fit together.
        LossAggError: replicas of the gradient disagree.
    """
    check_fits(batch, layout, gpt)
    initialize_model_parallel(layout)
    flags = {
        "calculate_per_token_loss": calculate_per_token_loss,
        "use_distributed_optimizer": use_distributed_optimizer,
        "overlap_grad_reduce": overlap_grad_reduce,
    }
    kept = objects_of_current_layout()
    key = (gpt, _model_layout(layout), *flags.values(), repr(sorted((ddp_overrides or {}).items())))
    use_own_model = chunks is None
    if chunks is None:
        # A run that fails leaves hooks and buffers in the middle of a step: not put back then.
        chunks = kept.pop(key, None) or build_model_chunks(
            gpt, layout, ddp_overrides=ddp_overrides, **flags
        )
        set_config_hooks(chunks)
    _forget_logged_moe_losses()
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    context = _context(batch, layout, gpt, chunks, forward_only)
    plan = plan_step(context)
    store = _run_schedule(batch, context, plan, collect_non_loss_data)
    report = plan.finish(store) if plan.finish is not None else None
    gradients = None
    if not forward_only:
        gradients = whole_model_gradient(chunks, tolerance=replica_tolerance, to_all_ranks=False)
    if use_own_model:
        kept[key] = chunks
    is_first_rank = dist.get_rank() == 0
    return RunResult(gradients if is_first_rank else None, _detached(store), _detached(report))


def _forget_logged_moe_losses() -> None:
    """Empty Megatron's log of auxiliary losses, which has the first model's number of layers."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    for module in (parallel_state, moe_utils):  # up to 0.13, and since
        tracker = getattr(module, "get_moe_layer_wise_logging_tracker", None)
        if tracker is not None:
            tracker().clear()


def _run_schedule(
    batch: GlobalBatch | PackedBatch,
    context: StepContext,
    plan: StepPlan,
    collect_non_loss_data: bool,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # With variable_seq_lengths Megatron asks the microbatches instead.
    micro_batch_size, seq_length = batch.shapes(context.dp_rank)[0]
    with torch.set_grad_enabled(not context.forward_only):
        return get_forward_backward_func()(
            forward_step_func=plan.forward_step_func,
            data_iterator=plan.data_iterator,
            model=context.chunks,
            num_microbatches=plan.num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=context.forward_only,
            collect_non_loss_data=collect_non_loss_data,
        )


def _context(
    batch: GlobalBatch | PackedBatch,
    layout: Layout,
    gpt: TinyGPT,
    chunks: list[Any],
    forward_only: bool,
) -> StepContext:
    from megatron.core import parallel_state

    dp_rank = parallel_state.get_data_parallel_rank()
    device = current_device()
    return StepContext(
        layout=layout,
        gpt=gpt,
        chunks=chunks,
        model_config=unwrap(chunks[0]).config,
        microbatches=[
            {name: tensor.to(device) for name, tensor in microbatch.items()}
            for microbatch in batch.microbatches(dp_rank)
        ],
        forward_only=forward_only,
        dp_rank=dp_rank,
        cp_rank=parallel_state.get_context_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
    )


def _model_layout(layout: Layout) -> Layout:
    """The layout without what the model does not depend on."""
    has_remainder = layout.vpp > 1 and layout.num_microbatches % layout.pp != 0
    return layout if has_remainder else replace(layout, num_microbatches=layout.pp)


def _detached(value: Any) -> Any:
    """Copies of tensors on the CPU, without their graph, inside the usual containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_detached(item) for item in value)
    return value
