"""A microbatch before and after planning: its fields, the options of its weights, its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError, keys_or_type
from megatron_lossagg.plain_tensors import dict_hint
from megatron_lossagg.weights.metrics import Metric
from megatron_lossagg.weights.weighting import MAIN_MASK, Weighting, distinct_masks

Microbatch = Mapping[str, Any]
NumMicrobatches = int | Callable[[], int]

# Fields that only serve counting. They have no token dimension, so context-parallel slicers, which
# cut every field, would break on them.
COUNTING_KEYS = ("sample_mask", "unit_ids")
# Beside them `loss_mask` is counted; all have their place in one vector of fixed length.
MAX_TERM_MASKS = 8
# What a host that shares counts among tensor-parallel ranks puts beside the weights.
METRIC_DIVISORS = "lossagg_metric_divisors"
RESERVED_KEYS = (*COUNTING_KEYS, "cu_seqlens", "cu_seqlens_padded")


def check_weights_key(weights_key: Any) -> None:
    """Raise ValueError unless it can name the field of the weights."""
    if not isinstance(weights_key, str) or not weights_key or weights_key in RESERVED_KEYS:
        raise ValueError(
            f"weights_key={weights_key!r} cannot name the field of the weights; pass 'loss_mask' "
            f"or a name of your own ({', '.join(RESERVED_KEYS)} have other meanings)."
        )


@dataclass(frozen=True)
class WeightOptions:
    """How the weights of every step of an aggregator are built and carried.

    Attributes:
        weightings: the distinct modes and masks of the terms.
        weights_keys: for each of them the field of a microbatch that carries its weights.
        weight_dtype: their dtype.
        masks_are_cp_sliced: masks are this context-parallel rank's part already.
        metrics: the metrics that are sums, which are divided by counts.
        keeps_mask: no term uses `loss_mask`: the field keeps the mask, and no weights.
        mask_keys: the distinct masks of the terms.
        masks_with_units: the masks whose units are counted, each with the option that needs it.
    """

    weightings: tuple[Weighting, ...]
    weights_keys: tuple[str, ...]
    weight_dtype: torch.dtype
    masks_are_cp_sliced: bool = False
    metrics: tuple[Metric, ...] = ()
    keeps_mask: bool = False
    mask_keys: tuple[str, ...] = field(init=False)
    masks_with_units: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        of_modes = {
            w.mask_key: f"loss_agg_mode={w.spec.loss_agg_mode!r}"
            for w in self.weightings
            if w.spec.needs_units
        }
        of_metrics = {
            m.mask_key: f"metric {m.name!r} over units"
            for m in self.metrics
            if m.normaliser == "units"
        }
        object.__setattr__(self, "mask_keys", distinct_masks(self.weightings))
        object.__setattr__(self, "masks_with_units", of_metrics | of_modes)


def masks_to_count(
    microbatches: Sequence[Microbatch], mask_keys: tuple[str, ...]
) -> tuple[str, ...]:
    """The masks of a step, the main one first.

    That is `loss_mask`, also where no term uses it: its valid tokens are what Megatron divides MoE
    auxiliary and multi-token prediction losses by. In a batch that has none, the mask of the first
    term stands in.

    Args:
        microbatches: of this rank.
        mask_keys: the distinct masks of the terms.

    Returns:
        The mask keys.

    Raises:
        ValueError: some microbatches have it, and others do not, or the terms have more masks than
            can be counted.
    """
    if len(mask_keys) > MAX_TERM_MASKS:
        raise ValueError(
            f"{len(mask_keys)} distinct masks are counted, at most {MAX_TERM_MASKS} can be: let "
            "terms share a mask_key. Means over many groups of tokens, such as data sources, need "
            "no masks: report two metrics declared 'sum' for each, the values times a 0/1 "
            "indicator of the group, and the indicator."
        )
    if MAIN_MASK in mask_keys:
        return mask_keys
    have_it = [microbatch.get(MAIN_MASK) is not None for microbatch in microbatches]
    if any(have_it) and not all(have_it):
        raise ValueError(
            f"Microbatch {have_it.index(False)} has no {MAIN_MASK!r}, but others of this step do. "
            "Megatron divides its own losses by the tokens of that mask: give it to all "
            "microbatches, or to none."
        )
    return (MAIN_MASK, *mask_keys) if any(have_it) else mask_keys


def tells_num_tokens(microbatch: Microbatch, options: WeightOptions) -> bool:
    """Whether `loss_mask` of the planned copy, not its weights, tells which tokens are valid.

    So it does where no term uses that mask. If it is kept in a field of weights, or if a
    `sample_mask`, which does not travel, marks rows as padding, the copy has a mask of its own.
    """
    is_told_by_weights = MAIN_MASK in options.mask_keys
    has_padding = microbatch.get("sample_mask") is not None
    is_there = options.keeps_mask or microbatch.get(MAIN_MASK) is not None
    return not is_told_by_weights and is_there and (options.keeps_mask or has_padding)


def carry_weights(copy: dict[str, Any], weights: Sequence[Tensor], options: WeightOptions) -> None:
    """Put the weights of a microbatch into its copy.

    A mask that is kept has the dtype of weights, as it rides where a host expects one or the other.
    """
    if options.keeps_mask:
        copy[MAIN_MASK] = (copy[MAIN_MASK] != 0).to(options.weight_dtype)
    copy.update(zip(options.weights_keys, weights, strict=True))


def without_counting_keys(microbatch: Microbatch) -> dict[str, Any]:
    """A shallow copy without the fields that only serve counting."""
    return {k: v for k, v in microbatch.items() if k not in COUNTING_KEYS}


def resolve_num_microbatches(num_microbatches: NumMicrobatches) -> int:
    """M from a number or a function that gives it; raises unless it is an int of at least 1."""
    value: Any = num_microbatches() if callable(num_microbatches) else num_microbatches
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"num_microbatches must be an int (or a function giving one), got {value!r}."
        )
    if value < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {value}.")
    return int(value)


def check_microbatches(microbatches: Any, num_microbatches: int | None) -> int:
    """M of a list of microbatches; raises if it is empty, or not of the number that is given."""
    if not isinstance(microbatches, Sequence) or isinstance(microbatches, str | bytes):
        raise TypeError(
            f"begin_step expects a list of microbatches, got {type(microbatches).__name__}. "
            "For an iterator that a trainer owns, use aggregator.wrap(iterator, "
            "num_microbatches=...)."
        )
    if len(microbatches) == 0:
        raise ValueError(
            "begin_step got an empty list. A rank without sequences passes microbatches whose "
            "masks are all 0 (the schedule needs them); a rank without data passes None and "
            "num_microbatches."
        )
    if num_microbatches is not None and num_microbatches != len(microbatches):
        raise ValueError(
            f"begin_step got {len(microbatches)} microbatches but num_microbatches="
            f"{num_microbatches}; leave num_microbatches out or make them equal."
        )
    return len(microbatches)


def check_microbatch(microbatch: Any, index: int, options: WeightOptions) -> None:
    """Raise on a microbatch that cannot be planned."""
    if not isinstance(microbatch, Mapping):
        raise TypeError(
            f"Microbatch {index} is a {type(microbatch).__name__}; expected a dict of tensors with "
            f"{options.mask_keys[0]!r}.{dict_hint(microbatch)}"
        )
    for mask_key in options.mask_keys:
        if microbatch.get(mask_key) is None:
            raise ValueError(
                f"Microbatch {index} has no {mask_key!r}; its keys are "
                f"{keys_or_type(microbatch)}. Add the mask [b, s] of the tokens that count, "
                "aligned with the labels."
            )
    for weights_key in options.weights_keys:
        if weights_key != "loss_mask" and weights_key in microbatch:
            raise ValueError(
                f"Microbatch {index} already has a field {weights_key!r}, where the weights would "
                "go. Rename it, or pass another weights_key to LossAggregator."
            )
    if options.masks_with_units and microbatch.get("unit_ids") is None:
        what = next(iter(options.masks_with_units.values()))
        raise ValueError(
            f"Microbatch {index} has no 'unit_ids' [num_seqs], which {what} needs: the unit "
            "(rollout, prompt) of each sequence."
        )
    if options.masks_are_cp_sliced and microbatch.get("cu_seqlens") is not None:
        raise LossAggError(
            f"Microbatch {index} has cu_seqlens and masks_are_cp_sliced=True: the boundaries of "
            "whole sequences do not describe a sliced mask. Plan with full masks and slice "
            "afterwards with slice_for_cp."
        )
