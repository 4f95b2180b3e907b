"""The mean over the rows of a microbatch of each row's mean, for `agg_loss`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.weighted_sum import looking_is_free, where_nonzero

_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_CHUNK = 128  # with 256, equal numbers round more than in `sum`
_NUM_FOR_ONE_PASS = 2**17  # below it, what that kernel costs at any size is more than it saves


def mean_of_row_means(losses: Tensor, mask: Tensor, count: int | float | Tensor | None) -> Tensor:
    """sum_s(sum_t(m * l) / n_s) / count, m being 1 where `mask` is not 0, else 0.

    Does not communicate, and syncs with no device. Masked losses are removed by selection, which on
    a CPU is done where one of them turns out to be NaN or inf. Rows without a valid token add 0.

    Args:
        losses: [b, s], floating point.
        mask: [b, s], of the same dtype and device.
        count: by default the rows with a valid token. A 0 gives 0 if there is none, else inf.

    Returns:
        The mean, shape [], in the dtype of both.
    """
    if looking_is_free(losses, mask):
        number = count.item() if isinstance(count, Tensor) else count
        if number is None or number >= 1:  # so that a finite gradient stays finite
            mean: Tensor = _MeanOfRowMeans.apply(losses, mask, number)
            return mean
    num_tokens = num_tokens_of_rows(mask)
    total = (where_nonzero(losses, mask).sum(dim=-1) / num_tokens.clamp(min=1)).sum()
    return divided(total, count, lambda: (num_tokens > 0).sum())


def num_tokens_of_rows(mask: Tensor) -> Tensor:
    """Valid tokens of every row, exact up to the integers of the mask's dtype."""
    return where_nonzero(mask.new_ones(()).expand_as(mask), mask).sum(dim=-1)


def divided(
    total: Tensor, count: float | Tensor | None, count_valid: Callable[[], Tensor]
) -> Tensor:
    """Total / count, by default what `count_valid` gives.

    Exactly 0 where both are empty, inf where only the count claims to be.
    """
    if isinstance(count, int | float) and count != 0:
        return total / count
    valid = count_valid()
    count = torch.as_tensor(
        valid if count is None else count, dtype=total.dtype, device=total.device
    )
    return total / torch.where((count == 0) & (valid == 0), 1, count)


class _MeanOfRowMeans(torch.autograd.Function):
    """On a CPU: divides once, and writes the gradient into the copy of the mask."""

    # Without `setup_context`, as in weighted_sum.py.
    @staticmethod
    def forward(ctx: Any, losses: Tensor, mask: Tensor, count: float | None) -> Tensor:
        """See `mean_of_row_means`."""
        valid = torch.ne(mask, 0, out=torch.empty_like(mask))  # vectorised, as a bool is not
        sums, num_tokens = _sums_of_rows(losses, valid)
        if count is None:
            count = max(torch.count_nonzero(num_tokens).item(), 1)
        divisor = num_tokens.clamp_(min=1).mul_(count)
        mean = sums.div_(divisor).sum()
        # 0 times what is finite is what selection gives, and 0 times NaN or inf is NaN.
        if not math.isfinite(mean.item()):
            sums, _ = _sums_of_rows(where_nonzero(losses, valid), valid)
            mean = sums.div_(divisor).sum()
        ctx.save_for_backward(mask, divisor)
        ctx.save_for_forward(mask, divisor)
        ctx.valid = valid
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Over n_s and the count where the loss counts, 0 elsewhere."""
        mask, divisor = ctx.saved_tensors
        of_rows = gradient / divisor
        valid, ctx.valid = ctx.valid, None
        if (
            valid is None  # a second pass over a graph that was retained
            or torch.is_grad_enabled()
            or not looking_is_free(gradient, mask)
            or not math.isfinite(gradient.item())
        ):
            return where_nonzero(of_rows.expand_as(mask), mask), None, None
        # In place: nobody else holds this tensor, and a new one has to be brought into the caches.
        return valid.mul_(of_rows), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """The mean is linear in the losses."""
        mask, divisor = ctx.saved_tensors
        return (where_nonzero(tangent, mask).sum(dim=-1, keepdim=True) / divisor).sum()


def _sums_of_rows(losses: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """sum_t(v * l) and sum_t(v) of every row, each [b, 1].

    Both ways round as `sum` does, which adds few terms one after another: in the second, those of a
    chunk in each lane of a register. `torch.dot` reads as little, but adds thousands so.
    """
    (num_rows, width), chunk = losses.shape, math.gcd(losses.shape[1], _CHUNK)
    if (
        losses.numel() < _NUM_FOR_ONE_PASS
        or chunk < _CHUNK // 4
        or not (losses.is_contiguous() and valid.is_contiguous())
    ):
        return (losses * valid).sum(-1, keepdim=True), valid.sum(-1, keepdim=True)
    # Batch norm's gradients of its weight and bias, with mean 0 and variance 1, are these two sums
    # per channel: the one operator that gives them in one pass. A chunk of a row is a channel.
    num_chunks = num_rows * (width // chunk)
    shape = (1, num_chunks, chunk)
    mean, variance = _zeros_and_ones(num_chunks, losses.dtype)
    inputs = (valid.view(shape), losses.view(shape), None, mean, variance, None, None)
    _, products, counts = _batch_norm_backward(*inputs, False, 0.0, [False, True, True])
    of_rows = (num_rows, width // chunk)
    return (
        products.view(of_rows).sum(-1, keepdim=True),
        counts.view(of_rows).sum(-1, keepdim=True),
    )


@functools.lru_cache(maxsize=8)
def _zeros_and_ones(num: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"dtype": dtype, "device": "cpu"}  # whatever the default device
    return torch.zeros(num, **options), torch.ones(num, **options)
