"""All-gathers over a context-parallel group, told apart by what their backward does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GatherAndSum(torch.autograd.Function):
    """Communicates over the group given: every rank's part, on every rank.

    Backward: the gradients of all ranks for this rank's part are summed (a reduce-scatter).
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        """A tensor on each rank, of one shape -> all of them, in the order of the ranks."""
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient for this rank's part, summed over ranks."""
        # Not a reduce-scatter: gloo has none in older releases of torch.
        stacked = torch.stack(gradients)
        dist.all_reduce(stacked, group=ctx.group)
        return stacked[ctx.group.rank()], None


def gather_values(part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Communicates over the group given: every rank's part, with a gradient in this rank's alone.

    Args:
        part: a tensor of one shape on every rank.
        group: the ranks.

    Returns:
        All parts in the order of the ranks; this rank's is `part` itself, the others are constants.
    """
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    parts[group.rank()] = part
    return tuple(parts)
