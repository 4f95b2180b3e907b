"""What `loss_func` returns besides its sums: the number of tokens, and a loss with a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.step.context import StepContext
from megatron_lossagg.weights.marks import valid_tokens
from megatron_lossagg.weights.weighting import MAIN_MASK


def check_gradients_are_wanted(context: StepContext) -> None:
    """Raise LossAggError where a loss is computed with gradients on, or off, against the plan."""
    if context.divides_later and not torch.is_grad_enabled():
        raise LossAggError(
            "denominators='deferred' divides when gradients are finalized, which a run "
            "without gradients does not do. Evaluate with another LossAggregator, which counts "
            "first (denominators='counted')."
        )
    if context.forward_only and torch.is_grad_enabled():
        raise LossAggError(
            "This stream was wrapped with forward_only=True, and its loss is computed with "
            "gradients on. Evaluate under torch.no_grad(), or wrap the stream without it."
        )


def num_valid_tokens(
    microbatch: Mapping[str, Any], weights: Sequence[Tensor], context: StepContext
) -> Tensor:
    """n, the valid tokens of `loss_mask` in this part of a microbatch, int32 []. No sync.

    Whatever modes, terms and other masks are: Megatron divides MoE auxiliary and multi-token
    prediction losses by the sum of it. A token is counted once over context-parallel ranks.
    """
    num_tokens = _is_valid(microbatch, weights, context).sum(dtype=torch.int32)
    if context.cp_copies > 1 and context.groups.cp_rank > 0:
        return torch.zeros_like(num_tokens)
    return num_tokens


def _is_valid(
    microbatch: Mapping[str, Any], weights: Sequence[Tensor], context: StepContext
) -> Tensor:
    """By the marks of weights of `loss_mask`, and by the mask itself where no term uses it."""
    if context.objective.weightings[0].mask_key == MAIN_MASK:
        return valid_tokens(weights[0])
    loss_mask = microbatch.get(MAIN_MASK)
    if loss_mask is None and context.main_mask_is_kept:
        raise LossAggError(
            f"The microbatch given to loss_func has no {MAIN_MASK!r}, whose tokens Megatron "
            "divides by when calculate_per_token_loss is on. No term uses that mask, so the field "
            "keeps the mask itself: broadcast and slice it as the fields of weights."
        )
    if loss_mask is None:
        # A batch without that mask: the first term's stands in. Where a host has dropped the mask,
        # `validate` finds the number wrong.
        return valid_tokens(weights[0])
    if loss_mask.shape != weights[0].shape:
        raise ValueError(
            f"The microbatch given to loss_func has a {MAIN_MASK!r} of shape "
            f"{tuple(loss_mask.shape)} and weights of shape {tuple(weights[0].shape)}. Slice both "
            "over context-parallel ranks, as slice_for_cp does: Megatron divides by the number of "
            "valid tokens of this rank's part."
        )
    is_valid: Tensor = loss_mask != 0
    return is_valid


def num_trained_tokens_seen(weights: Sequence[Tensor], context: StepContext) -> Tensor:
    """Above 0 if a term that trains has a valid token in this part of a microbatch, float64 []."""
    masks = context.objective.masks_of_terms_that_train(context.coefficients)
    seen = [
        valid_tokens(w).sum(dtype=torch.float64)
        for w, weighting in zip(weights, context.objective.weightings, strict=True)
        if weighting.mask_key in masks
    ]
    return torch.stack(seen).sum() if seen else torch.zeros((), dtype=torch.float64)


def metric_denominators(weights: Sequence[Tensor], context: StepContext) -> list[Tensor | float]:
    """What a microbatch adds to the denominators of metric sums where divisors are not known."""
    objective, copies = context.objective, context.cp_copies
    found: list[Tensor | float] = []
    for metric, place in zip(objective.metric_sums, objective.places_of_metric_sums, strict=True):
        if metric.normaliser == "tokens":
            found.append(valid_tokens(weights[place]).sum() / copies)
        else:
            found.append(context.share if metric.normaliser == "sum" else math.nan)
    return found


def with_graph(total: Tensor, output: Any, groups: ParallelGroups) -> Tensor:
    """`total`, connected to the output by a gradient of 0 where the loss does not depend on it.

    A microbatch whose advantages are all 0 may give such a loss. Without a backward pass through
    the model earlier pipeline stages would wait for a gradient, and losses that Megatron adds to
    the graph itself would be lost. A loop of one process without Megatron sees torch's own error.
    """
    if total.requires_grad or not torch.is_grad_enabled() or not groups.is_of_megatron:
        return total
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return total
    first = leaves[0][(slice(0, 1),) * leaves[0].dim()].sum().to(total.dtype)
    return torch.where(torch.ones_like(total, dtype=torch.bool), total, first)
