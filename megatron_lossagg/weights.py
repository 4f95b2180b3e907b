"""From a mask and the global counts to a weight per token."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lossagg.counts import GlobalCounts, valid_tokens
from megatron_lossagg.modes import ModeSpec, get_mode

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
    norm_semantics: str = "sum",
    sequence_count: str = "valid",
    sample_mask: Tensor | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of every token in the global objective `J = sum of w * l`. Does not communicate.

    The gradient of J with respect to the token losses *is* this tensor. Formulas: `modes.py`.

    Args:
        loss_mask: [b, s], one sequence per row at its full length (before context-parallel
            slicing), values 0 and 1, any dtype.
        loss_agg_mode: one of `modes.mode_names()`.
        counts: counts of the whole global batch, from `count_global_batch`.
        loss_scale_factor: L, required by `seq-mean-token-sum-norm`.
        norm_semantics: "sum" (1/L) or "seq-mean" (1/(B*L)).
        sequence_count: which rows are B, "valid" or "nominal".
        sample_mask: [b], 0 marks a row that only pads the batch. None: all rows are real.
        weight_dtype: dtype of the result; the arithmetic is float64.

    Returns:
        Tensor [b, s] of `weight_dtype` on the mask's device, exactly 0 at masked tokens.

    Raises:
        ValueError: unknown mode or option, L missing or not above zero, a mask that is not [b, s].
        TypeError: a mask that is no tensor, or a `weight_dtype` that cannot hold weights.
    """
    check_weight_dtype(weight_dtype)
    spec = ModeSpec(loss_agg_mode, loss_scale_factor, norm_semantics, sequence_count)
    valid = valid_tokens(loss_mask, sample_mask)
    return weights_of_rows(valid, valid.sum(dim=1), spec, counts, weight_dtype=weight_dtype)


def weights_of_rows(
    valid: Tensor,
    num_tokens_of_rows: Tensor,
    spec: ModeSpec,
    counts: GlobalCounts,
    *,
    times_num_tokens: bool = False,
    weight_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights from rows that were already counted. Does not communicate.

    Args:
        valid: bool [b, s].
        num_tokens_of_rows: n_s, integer [b].
        spec: the mode and its options.
        counts: counts of the global batch.
        times_num_tokens: return T * w instead of w, for schedules whose finalize divides by T.
        weight_dtype: dtype of the result.

    Returns:
        Tensor [b, s] of `weight_dtype`, 0 where `valid` is False.
    """
    inputs = spec.inputs(counts, valid.device)
    factor = get_mode(spec.loss_agg_mode).sequence_factor(num_tokens_of_rows.double(), inputs)
    if times_num_tokens:
        factor = factor * inputs.num_tokens
    factor = factor.to(weight_dtype).expand(valid.shape[0]).unsqueeze(1)
    # A product of finite numbers: cheaper than a selection, and just as exact.
    return valid.to(weight_dtype) * factor
