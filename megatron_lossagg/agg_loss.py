"""Drop-in for verl's `agg_loss` (verl/trainer/ppo/core_algos.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.modes.options import check_loss_scale_factor, check_norm_semantics
from megatron_lossagg.modes.registry import get_mode
from megatron_lossagg.plain_tensors import check_plain_tensor
from megatron_lossagg.row_means import divided, mean_of_row_means, num_tokens_of_rows
from megatron_lossagg.weighted_sum import where_nonzero

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

    It does not use the modes' own factors, which are of global counts: verl's counts default to the
    microbatch's, D is in the value, and its norm mode lacks D. Options that a mode does not read
    are ignored without a warning, as callers of verl's function pass all of them.

    Source: verl `agg_loss`. It differs from it on purpose in two points: no 1e-8 is added to a
    sequence's count, and masked values are selected away, not multiplied by zero.
    """
    if loss_agg_mode not in _MODES:
        raise ValueError(_refusal(loss_agg_mode))
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
    losses = loss_mat.to(mask.dtype)

    if loss_agg_mode == "seq-mean-token-mean":
        return _multiplied(dp_size, mean_of_row_means(losses, mask, global_batch_size).to(dtype))

    total = where_nonzero(losses, mask).sum().to(dtype)
    if loss_agg_mode == "token-sum":
        return _multiplied(dp_size, total)
    if loss_agg_mode == "token-mean":
        total = divided(
            total, batch_num_tokens, lambda: num_tokens_of_rows(mask).sum(dtype=torch.float64)
        )
        return _multiplied(dp_size, total)

    def num_seqs() -> Tensor:
        return (num_tokens_of_rows(mask) > 0).sum()

    if loss_agg_mode == "seq-mean-token-sum":
        return _multiplied(dp_size, divided(total, global_batch_size, num_seqs))

    width = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    check_loss_scale_factor(width)
    if norm_semantics == "sum":
        return total / width
    return _multiplied(dp_size, divided(total, global_batch_size, num_seqs) / width)


def _refusal(loss_agg_mode: Any) -> str:
    """Why a mode is not taken: verl does not have it, or nobody."""
    try:
        get_mode(loss_agg_mode)
    except ValueError:
        return f"Unknown loss_agg_mode {loss_agg_mode!r}; expected one of {', '.join(_MODES)}."
    return (
        f"agg_loss cannot compute {loss_agg_mode!r}, only verl's {', '.join(_MODES)}; use "
        "LossAggregator or token_weights."
    )


def _multiplied(dp_size: int, value: Tensor) -> Tensor:
    return value if dp_size == 1 else value * dp_size  # a factor of 1 is two operators for nothing
