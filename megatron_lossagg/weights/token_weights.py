"""From a mask and the global counts to a weight per token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.counts.units import LocalUnits
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.modes.options import OPTION_NAMES, ModeOptions
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.modes.unread import warn_of_unread
from megatron_lossagg.weights.marks import mark_zeros

WEIGHT_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
}


def check_weight_dtype(weight_dtype: torch.dtype) -> None:
    """Raise TypeError unless the dtype can hold 1/T of any batch: float16 cannot."""
    if weight_dtype not in WEIGHT_DTYPES.values():
        raise TypeError(
            f"weight_dtype must be one of torch.{', torch.'.join(WEIGHT_DTYPES)}, got "
            f"{weight_dtype!r}."
        )


def token_weights(
    loss_mask: Tensor,
    loss_agg_mode: str,
    counts: GlobalCounts,
    *,
    loss_scale_factor: float | None = None,
    norm_semantics: str | None = None,
    sequence_count: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    unit_ids: Tensor | None = None,
    sample_mask: Tensor | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of every token in the global objective `J = sum of w * l`. Does not communicate.

    The gradient of J with respect to the token losses *is* this tensor. Formulas: `modes`.

    Args:
        loss_mask: [b, s], one sequence per row at its full length (before context-parallel
            slicing), or [1, t] with `cu_seqlens`; values 0 and 1, any dtype.
        loss_agg_mode: one of `modes.mode_names()`.
        counts: counts of the whole global batch, from `count_global_batch`.
        loss_scale_factor: L, required by `seq-mean-token-sum-norm`.
        norm_semantics: "sum" (1/L) or "seq-mean" (1/(B*L)).
        sequence_count: which sequences are B and which units are U, "valid" or "nominal".
        cu_seqlens: int [num_seqs + 1] or [1, num_seqs + 1], boundaries of packed sequences.
        cu_seqlens_padded: as `cu_seqlens`, where each sequence starts if it is padded.
        unit_ids: int [num_seqs], the unit of each sequence, in modes with units.
        sample_mask: [num_seqs], 0 marks a sequence that only pads the batch. None: all are real.
        weight_dtype: dtype of the result; the arithmetic is float64.

    Returns:
        Tensor of `weight_dtype` and the mask's shape on its device: +0.0 at masked tokens, and -0.0
        at valid ones to which the mode gives the weight 0 (see `marks`).

    Raises:
        ValueError: unknown mode or option, L missing or not above zero, a mask of another shape,
            unit_ids missing in a mode with units.
        TypeError: a mask that is no tensor, or a `weight_dtype` that cannot hold weights.
    """
    check_weight_dtype(weight_dtype)
    options = ModeOptions(
        loss_scale_factor=loss_scale_factor,
        norm_semantics=norm_semantics,
        sequence_count=sequence_count,
    )
    spec = ModeSpec.of(loss_agg_mode, options)
    warn_of_unread(spec, options, OPTION_NAMES)
    sequences = Sequences.of(loss_mask, sample_mask, cu_seqlens, cu_seqlens_padded)
    unit_of_seq = None
    if spec.needs_units:
        if unit_ids is None or counts.unit_num_tokens is None:
            raise ValueError(
                f"loss_agg_mode={loss_agg_mode!r} needs unit_ids [num_seqs] and counts with units."
            )
        num_units = counts.unit_num_tokens.shape[0]
        unit_of_seq = LocalUnits.of(sequences, [unit_ids], num_units).unit_of_seq
    [weights] = weights_of_sequences(
        sequences, spec, counts, unit_of_seq=unit_of_seq, weight_dtype=weight_dtype
    )
    return weights


def weights_of_sequences(
    sequences: Sequences,
    spec: ModeSpec,
    counts: GlobalCounts,
    *,
    unit_of_seq: Tensor | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The weights of each microbatch, [b, s] of `weight_dtype`. Does not communicate."""
    factors = sequence_weights(
        sequences, spec, counts, unit_of_seq=unit_of_seq, weight_dtype=weight_dtype
    )
    return [factors.spread(index) for index in range(len(sequences.sizes))]


@dataclass(frozen=True)
class SequenceWeights:
    """The weight of a valid token of each sequence.

    Attributes:
        values: [N], -0.0 where a sequence has tokens of weight 0, +0.0 where it has no token.
        sequences: whose weights they are.
        selects: whether spreading them takes a selection: a product is cheaper, but makes -0.0 or
            NaN at masked tokens of sequences whose value is not a positive number.
    """

    values: Tensor
    selects: bool
    sequences: Sequences

    @cached_property
    def _of_microbatches(self) -> tuple[Tensor, ...]:
        return self.values.split(self.sequences.sizes)  # once: a step has thousands

    def spread(self, index: int) -> Tensor:
        """The weights [b, s] of microbatch `index`."""
        values = self._of_microbatches[index]
        return self.sequences.spread(index, values, selects=self.selects)


def sequence_weights(
    sequences: Sequences,
    spec: ModeSpec,
    counts: GlobalCounts,
    *,
    unit_of_seq: Tensor | None = None,
    multiplier: Tensor | None = None,
    weight_dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> SequenceWeights:
    """The weight of a valid token of each sequence. Does not communicate.

    Args:
        sequences: their n_s are read; N of them.
        spec: the mode and its options.
        counts: counts of the global batch.
        unit_of_seq: int64 [N], in modes with units.
        multiplier: a number [] to multiply by, for schedules whose finalize divides by it.
        weight_dtype: of the result; the arithmetic is float64.
        device: where weights are made; None: where n_s are.

    Returns:
        The weights, [N], to be spread over tokens.

    Raises:
        LossAggError: a registered mode gave something else than a factor per sequence, or (on the
            CPU) no finite number for a sequence with tokens.
    """
    num_tokens = sequences.num_tokens
    if device is not None:
        num_tokens = num_tokens.to(device, non_blocking=True)
    inputs = spec.inputs(counts, num_tokens.device, unit_of_seq)
    factor = spec.mode.sequence_factor(num_tokens.double(), inputs)
    _check_factor(factor, spec.loss_agg_mode, num_tokens)
    has_tokens = num_tokens > 0
    # A factor of a sequence without tokens may be anything, also inf.
    factor = torch.where(has_tokens, factor, 0.0)
    if multiplier is not None:
        factor = factor * multiplier.to(factor.device)
    # After the cast, which may round to 0.
    values = mark_zeros(factor.to(weight_dtype), has_tokens)
    # On the CPU a value can be looked at without waiting for anything.
    are_positive = (values > 0) & torch.isfinite(values) | ~has_tokens
    selects = values.device.type != "cpu" or not bool(are_positive.all())
    return SequenceWeights(values, selects, sequences)


def _check_factor(factor: Any, loss_agg_mode: str, num_tokens: Tensor) -> None:
    """Raise LossAggError unless a mode gave one number per sequence, or one for all."""
    expected = f"one float64 factor per sequence, broadcastable to [{num_tokens.numel()}]"
    if not isinstance(factor, Tensor):
        raise LossAggError(
            f"loss_agg_mode={loss_agg_mode!r} gave a {type(factor).__name__}, expected {expected}."
        )
    if factor.shape not in ((), (1,), num_tokens.shape):
        raise LossAggError(
            f"loss_agg_mode={loss_agg_mode!r} gave factors of shape {tuple(factor.shape)}, "
            f"expected {expected}: its function gets n_s as [{num_tokens.numel()}]."
        )
    if factor.device.type == "cpu" and num_tokens.device.type == "cpu":
        is_wrong = (num_tokens > 0) & ~torch.isfinite(factor)
        if bool(is_wrong.any()):
            n_s = int(num_tokens[is_wrong.expand_as(num_tokens)][0])
            raise LossAggError(
                f"loss_agg_mode={loss_agg_mode!r} gave no finite factor for a sequence of {n_s} "
                "valid tokens: its weights would make every loss NaN or inf. Mind divisions by 0 "
                "in the function that was registered."
            )
