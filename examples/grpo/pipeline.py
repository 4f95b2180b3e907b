"""Forward-only passes through the pipeline: what sampling and log-probabilities have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg import ParallelGroups, slice_for_cp

# (output of the last stage, this context-parallel rank's microbatch) -> what to collect.
Collect = Callable[[Tensor, dict[str, Tensor]], Tensor]


@torch.no_grad()
def forward_only(
    chunks: list[Any],
    microbatches: list[dict[str, Tensor]],
    collect: Collect,
    *,
    with_labels: bool,
) -> Tensor | None:
    """Run Megatron's schedule forward and collect something per row on the last stage.

    Communicates over the pipeline group (and, inside the model, over the others). All ranks of a
    replica pass the same microbatches at full length; this slices them for context parallelism.

    Args:
        chunks: this rank's model chunks.
        microbatches: "tokens", "position_ids" and, with_labels, "labels", all [b, s] of one shape.
        collect: applied to the last stage's output.
        with_labels: the model returns -log p(label) [b, s]; without, logits [b, s, vocab].

    Returns:
        What was collected of all rows, in order, on the last stage; None on the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        microbatch = slice_for_cp(next(data_iterator))
        output = model(
            microbatch["tokens"],
            microbatch["position_ids"],
            None,
            labels=microbatch["labels"] if with_labels else None,
            # Logits are sampled from: every tensor-parallel rank needs the whole vocabulary.
            runtime_gather_output=None if with_labels else True,
        )
        return output, partial(_call_collect, collect, microbatch)

    num_rows, width = microbatches[0]["tokens"].shape
    collected = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=width,
        micro_batch_size=num_rows,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return torch.cat(collected) if collected else None


def _call_collect(
    collect: Collect, microbatch: dict[str, Tensor], output: Tensor, non_loss_data: bool = True
) -> Tensor:
    # The schedule passes non_loss_data=True to tell a loss function which of its jobs is meant.
    return collect(output, microbatch)


def sum_over_cp(tensor: Tensor, groups: ParallelGroups) -> Tensor:
    """Sum in place over the context-parallel group."""
    if groups.cp_size > 1:
        dist.all_reduce(tensor, group=groups.cp)
    return tensor


def share_from_last_stage(tensor: Tensor, groups: ParallelGroups) -> Tensor:
    """Give all ranks of the replica the last stage's tensor: broadcasts over tp, then over pp.

    The ranks of the last stage have computed it alike; the broadcast over tp makes sure that they
    hold the same bits, since a parallel sum may be rounded differently on two devices.
    """
    if groups.tp_size > 1 and groups.is_last_stage:
        dist.broadcast(tensor, src=dist.get_process_group_ranks(groups.tp)[0], group=groups.tp)
    if groups.pp_size > 1:
        dist.broadcast(tensor, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    return tensor
