"""A plan without the plugin: a weighted sum of token losses, scaled by hand for the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossagg.testing.layout.token_positions import positions_of_ranks
from megatron_lossagg.testing.model.layer_spec import supported_arguments
from megatron_lossagg.testing.model.model_chunks import model_output, token_log_probs
from megatron_lossagg.testing.ranks.parallel import current_device
from megatron_lossagg.testing.run import StepContext, StepPlan


@dataclass(frozen=True)
class SumLossPlan:
    """J = sum over the global batch of ``weight * mask * -log p(label)``, over `denominator`.

    Each microbatch returns its part of J, times M * D: Megatron divides by the number of
    microbatches and averages over data-parallel ranks, and it multiplies by C before it averages
    over context-parallel ranks (`calculate_per_token_loss` off, `loss_func` with two values).

    The report of a run is J, the same number on every rank; the schedule's forward_data_store
    holds each microbatch's part, not scaled.

    Attributes:
        denominator: a positive number.
        weights_key: field of the batch with a weight per token; all weights are 1 if None.
    """

    denominator: float
    weights_key: str | None = None

    def __call__(self, context: StepContext) -> StepPlan:
        """Give the schedule this rank's microbatches."""
        layout = context.layout
        factor = layout.num_microbatches * layout.dp / self.denominator
        iterators = [iter(context.microbatches) for _ in context.chunks]
        return StepPlan(
            forward_step_func=partial(self._forward_step, factor),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            num_microbatches=layout.num_microbatches,
            finish=self._finish,
        )

    def _forward_step(self, factor: float, data_iterator: Iterator[Any], model: Any) -> Any:
        microbatch = sliced_for_cp(next(data_iterator))
        return model_output(model, microbatch), partial(self._loss, factor, microbatch)

    def _loss(
        self,
        factor: float,
        microbatch: dict[str, torch.Tensor],
        logits: torch.Tensor,
        non_loss_data: bool = False,
    ) -> Any:
        losses = -token_log_probs(logits, microbatch["labels"])
        if non_loss_data:
            return losses
        if self.weights_key is not None:
            losses = losses * microbatch[self.weights_key].to(losses.dtype)
        total = torch.where(microbatch["loss_mask"] > 0, losses, 0.0).sum()
        # The schedule rescales what it gets in place: log another tensor than the one returned.
        return total * factor, total.detach() / self.denominator

    def _finish(self, forward_data_store: list[Any]) -> float:
        from megatron.core import parallel_state

        value = torch.zeros((), dtype=torch.float64, device=current_device())
        for part in forward_data_store:
            value = value + part.double()
        dist.all_reduce(
            value, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(value, group=parallel_state.get_pipeline_model_parallel_group())
        return value.item()


def sliced_for_cp(microbatch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This context-parallel rank's part of a microbatch, without the plugin's slicer.

    Padded rows are cut by Megatron's own slicer, packed sequences by `positions_of_ranks`.

    Args:
        microbatch: tensors [b, s, ...], which are sliced along s; others pass unchanged. The dict
            is not changed.

    Returns:
        A new dict; [b, s / C, ...] or packed [1, t / C, ...].
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    tables = {
        name: tensor
        for name, tensor in microbatch.items()
        if tensor.dim() > 1 and not name.startswith("cu_seqlens")
    }
    if "cu_seqlens" in microbatch:
        index = positions_of_ranks(microbatch, group.size())[group.rank()]
        return {**microbatch, **{name: t.index_select(1, index) for name, t in tables.items()}}
    # Releases from 0.18 take no group to mean the world group.
    kwargs = supported_arguments(get_batch_on_this_cp_rank, is_hybrid_cp=False, cp_group=group)
    return {**microbatch, **get_batch_on_this_cp_rank(tables, **kwargs)}
