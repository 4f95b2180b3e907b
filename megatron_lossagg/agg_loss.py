"""Drop-in for verl's `agg_loss` (verl/trainer/ppo/core_algos.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lossagg.loss import where_nonzero
from megatron_lossagg.modes import (
    check_loss_scale_factor,
    check_norm_semantics,
    get_mode,
)
from megatron_lossagg.plain_tensors import check_plain_tensor

_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | float | Tensor | None = None,
    global_batch_size: int | float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    *,
    norm_semantics: str = "sum",
) -> Tensor:
    """Aggregate token losses of one microbatch into a scalar. Does not communicate.

    With m the mask, T = `batch_num_tokens`, B = `global_batch_size`, D = `dp_size`,
    L = `loss_scale_factor`, and sums over this microbatch only:

        token-mean                   D * sum(m * l) / T
        token-sum                    D * sum(m * l)
        seq-mean-token-sum           D * sum_s(sum_t(m * l)) / B
        seq-mean-token-mean          D * sum_s(sum_t(m * l) / n_s) / B
        seq-mean-token-sum-norm      sum(m * l) / L, or D * sum(m * l) / (B * L)
                                     with norm_semantics="seq-mean"

    D undoes the mean that DDP takes over data-parallel ranks: it is the data-parallel size, not the
    number of GPUs. Masked positions are removed by selection, so a NaN there changes nothing.

    Args:
        loss_mat: [bs, response_length], floating point.
        loss_mask: same shape; non-zero marks a valid token.
        loss_agg_mode: one of the modes above.
        dp_size: D.
        batch_num_tokens: T of the global batch. Default: this microbatch's valid tokens.
        global_batch_size: B of the global batch. Default: this microbatch's sequences with a valid
            token.
        loss_scale_factor: L. Default: `loss_mask.shape[-1]`.
        norm_semantics: "sum" (verl up to 0.7) or "seq-mean" (verl since 2026-02, TRL's dr_grpo).

    Returns:
        A scalar in float32, or in float64 for float64 losses. It is not reduced over ranks or
        microbatches.

    Raises:
        ValueError: a mode or semantics that is not verl's, shapes that differ, or L not above
            zero.
        TypeError: `loss_mat` is not floating point.

    Source: verl `agg_loss`. It differs from it on purpose in two points: no 1e-8 is added to a
    sequence's count, and masked values are selected away, not multiplied by zero.
    """
    if get_mode(loss_agg_mode).name not in _MODES:
        raise ValueError(
            f"agg_loss cannot compute {loss_agg_mode!r}, only verl's {', '.join(_MODES)}; use "
            "LossAggregator or token_weights."
        )
    check_norm_semantics(norm_semantics)
    check_plain_tensor(loss_mat, "loss_mat", "[bs, response_length]")
    check_plain_tensor(loss_mask, "loss_mask", "[bs, response_length]")
    if loss_mat.shape != loss_mask.shape or loss_mat.dim() != 2:
        raise ValueError(
            "agg_loss expects loss_mat and loss_mask of one shape (bs, response_length), got "
            f"{tuple(loss_mat.shape)} and {tuple(loss_mask.shape)}."
        )
    if not loss_mat.is_floating_point():
        raise TypeError(f"agg_loss expects floating-point losses, got {loss_mat.dtype}.")

    dtype = torch.promote_types(loss_mat.dtype, torch.float32)
    # Floating point of at least the mask's own precision: what is not 0 stays not 0.
    mask = loss_mask.detach().to(
        torch.promote_types(dtype, loss_mask.dtype) if loss_mask.is_floating_point() else dtype
    )
    losses = where_nonzero(loss_mat.to(mask.dtype), mask)

    if loss_agg_mode == "token-sum":
        return losses.sum().to(dtype) * dp_size
    if loss_agg_mode == "token-mean":
        return _divide(losses.sum().to(dtype), batch_num_tokens, mask) * dp_size
    if loss_agg_mode == "seq-mean-token-sum":
        return _divide_by_sequences(losses.sum().to(dtype), global_batch_size, mask) * dp_size
    if loss_agg_mode == "seq-mean-token-mean":
        num_tokens = _num_tokens_of_rows(mask)
        total = (losses.sum(dim=-1) / num_tokens.clamp(min=1)).sum().to(dtype)
        if global_batch_size is None:
            global_batch_size = (num_tokens > 0).sum()
        return _divide(total, global_batch_size, mask) * dp_size

    width = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    check_loss_scale_factor(width)
    total = losses.sum().to(dtype)
    if norm_semantics == "sum":
        return total / width
    return _divide_by_sequences(total, global_batch_size, mask) / width * dp_size


def _num_tokens_of_rows(mask: Tensor) -> Tensor:
    """Valid tokens of every row, exact up to the integers of the mask's dtype."""
    return where_nonzero(mask.new_ones(()).expand_as(mask), mask).sum(dim=-1)


def _divide_by_sequences(total: Tensor, count: int | float | Tensor | None, mask: Tensor) -> Tensor:
    if count is None:
        count = (_num_tokens_of_rows(mask) > 0).sum()
    return _divide(total, count, mask)


def _divide(total: Tensor, count: int | float | Tensor | None, mask: Tensor) -> Tensor:
    """Total / count, by default the valid tokens.

    Exactly 0 where both are empty, inf where only the count claims to be.
    """
    if isinstance(count, int | float) and count != 0:
        return total / count
    valid = _num_tokens_of_rows(mask).sum(dtype=torch.float64)
    count = torch.as_tensor(
        valid if count is None else count, dtype=total.dtype, device=mask.device
    )
    return total / torch.where((count == 0) & (valid == 0), 1, count)
