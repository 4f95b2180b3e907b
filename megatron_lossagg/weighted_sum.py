"""What happens inside the pipeline schedule: one masked multiply-and-sum times a Python number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggError, keys_or_type
from megatron_lossagg.plain_tensors import dict_hint

_select = torch.ops.aten.hardshrink_backward.default


def where_nonzero(values: Tensor, weights: Tensor) -> Tensor:
    """`values` where `weights` is not 0, exactly 0 elsewhere, whatever the values are there.

    Neither communicates nor syncs. Its gradient is 0 where the value is.

    Args:
        values: floating point.
        weights: of the same shape, dtype and device.

    Returns:
        A tensor like `values`.
    """
    if torch.compiler.is_compiling():  # fused with what surrounds it, in any form
        return torch.where(weights != 0, values, torch.zeros_like(values))
    # The backward of hardshrink(x, 0) is this selection, and the only one that is vectorised on a
    # CPU: a comparison that gives a bool, or `where` with a scalar, takes several times as long.
    return _select(values, weights, 0)


def looking_is_free(values: Tensor, weights: Tensor) -> bool:
    """Whether the host may read a value: both are on the CPU, and nothing records what is done.

    Neither a device has to be waited for then, nor does a graph (torch.compile, make_fx, a trace, a
    transform of torch.func) keep one of two branches for values to come.
    """
    return (
        not torch.compiler.is_compiling()
        and type(values) is type(weights) is Tensor  # not a fake or distributed one
        and values.is_cpu
        and weights.is_cpu
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
    )


def masked_weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """S = sum of w * l over positions with w != 0. Does not communicate and does not sync.

    Positions with weight 0 are removed by selection, so a NaN or inf there changes neither the
    value nor the gradient, while a NaN that counts still shows. The gradient with respect to
    `losses` is `weights` times that of S. Weights are constants: no gradient reaches them. On a CPU
    the host reads S, which takes no waiting there, and selects only if S is not finite.

    Args:
        losses: [b, s], floating point.
        weights: [b, s], floating point.

    Returns:
        S, shape [], in at least float32.
    """
    weights = weights.detach() if weights.requires_grad else weights
    if looking_is_free(losses, weights):
        total: Tensor = torch.mul(*_in_one_dtype(losses, weights)).sum()
        # 0 times what is finite is what selection gives, and 0 times NaN or inf is NaN: a finite
        # sum needs none, and is the same to the last bit without that pass.
        if math.isfinite(total.item()):
            return total
    if torch.compiler.is_compiling():
        return _weighted_sum(losses, weights)
    total = _MaskedWeightedSum.apply(losses, weights)
    return total


def _weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    losses, weights = _in_one_dtype(losses, weights)
    # In place: the selection is a tensor of its own, and another would be one more to allocate.
    return where_nonzero(losses, weights).mul_(weights).sum()


def _in_one_dtype(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if losses.dtype == weights.dtype == torch.float32:
        return losses, weights
    dtype = torch.promote_types(torch.promote_types(losses.dtype, weights.dtype), torch.float32)
    return losses.to(dtype), weights.to(dtype)


class _MaskedWeightedSum(torch.autograd.Function):
    """Keeps the weights alone, and writes the gradient in one pass."""

    # Without `setup_context`, which costs more than the sum of a small microbatch. Transforms of
    # torch.func need it and say so.
    @staticmethod
    def forward(ctx: Any, losses: Tensor, weights: Tensor) -> Tensor:
        """See `masked_weighted_sum`."""
        ctx.save_for_backward(weights)
        ctx.dtype = losses.dtype
        return _weighted_sum(losses, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Times the weights, which are 0 where the loss does not count."""
        [weights] = ctx.saved_tensors
        # Else the product, with one number, would be rounded to the dtype of the weights.
        of_losses: Tensor = gradient * weights.to(gradient.dtype)
        return of_losses if of_losses.dtype == ctx.dtype else of_losses.to(ctx.dtype), None


def weights_of(microbatch: Mapping[str, Any], weights_key: str) -> Tensor:
    """The weights that a planned microbatch carries.

    Args:
        microbatch: the fields of a microbatch by name.
        weights_key: the field of the weights.

    Returns:
        The tensor of weights, [b, s] or packed [1, t], floating point.

    Raises:
        LossAggError: it carries none.
        TypeError: what it carries is not floating point.
    """
    weights = microbatch.get(weights_key) if isinstance(microbatch, Mapping) else None
    if weights is None:
        raise LossAggError(
            f"The microbatch given to loss_func carries no weights under {weights_key!r} (found: "
            f"{keys_or_type(microbatch)}). Take microbatches from step.data_iterator(...) or from "
            "aggregator.wrap(...), and keep that field through get_batch and slicing."
            f"{dict_hint(microbatch)}"
        )
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        found = str(weights.dtype) if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(
            f"The field {weights_key!r} given to loss_func is {found}, but weights are fractions: "
            "pass the tensor that the wrapped iterator yields, and keep it in floating point where "
            "get_batch broadcasts it."
        )
    return weights
