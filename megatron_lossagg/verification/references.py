"""The reference of each plan: loss and gradient of its mode by one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.modes.registry import get_mode, registered_names
from megatron_lossagg.modes.table import ModeInputs
from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.reference import BatchCounts, SequenceWeight, reference_run
from megatron_lossagg.verification.aggregator_plan import AggregatorPlan, policy_gradient_losses

# (loss, global parameter name -> gradient).
Reference = tuple[float, dict[str, Tensor]]
# GlobalBatch.assignment -> the reference of every mode.
References = dict[Any, list[Reference]]


def references_on_rank(
    gpt: TinyGPT,
    batch: GlobalBatch,
    plans: Sequence[AggregatorPlan],
    token_losses: Callable[[Tensor, dict[str, Tensor]], Tensor] = policy_gradient_losses,
) -> list[Reference]:
    """Loss and gradient of every plan's mode by plain autograd on the whole batch."""
    return [
        reference_run(
            gpt,
            batch,
            token_losses,
            _registered_weight(plan) or plan.loss_agg_mode,
            loss_scale_factor=plan.loss_scale_factor,
            norm_semantics=plan.norm_semantics,
            sequence_count=plan.sequence_count,
        )
        for plan in plans
    ]


def _registered_weight(plan: AggregatorPlan) -> SequenceWeight | None:
    """The definition of a registered mode, its function, for `reference_loss`; None if built in."""
    if plan.loss_agg_mode not in registered_names():
        return None
    factor = get_mode(plan.loss_agg_mode).sequence_factor

    def weight(n_s: int, counts: BatchCounts) -> float:
        inputs = ModeInputs(
            num_tokens=_float64(counts.num_tokens),
            num_seqs=_float64(counts.num_seqs),
            num_valid_seqs=_float64(counts.num_valid_seqs),
            loss_scale_factor=plan.loss_scale_factor,
            norm_semantics=plan.norm_semantics,
        )
        return factor(_float64(n_s).reshape(1), inputs).item()

    return weight


def _float64(count: int) -> Tensor:
    return torch.tensor(count, dtype=torch.float64)
