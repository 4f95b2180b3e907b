"""Token losses of whole rows on every context-parallel rank: the conventions besides "local"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg.schedule.cp_slicing import slice_for_cp
from megatron_lossagg.schedule.options import CP_GRADIENTS
from megatron_lossagg.testing.layout.token_positions import positions_of_ranks
from megatron_lossagg.testing.model.cp_gather import GatherAndSum, gather_values

TokenLosses = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class FullRowLosses:
    """A `loss_fn` whose losses every context-parallel rank has in full; picklable.

    Attributes:
        token_losses: (output, microbatch) -> losses [b, s / C] of this rank's part.
        cp_gradient: "replicated-value", a gradient in this rank's own part alone, or "gathered", a
            gather whose backward sums over the ranks.
    """

    token_losses: TokenLosses
    cp_gradient: str

    def __post_init__(self) -> None:
        """Check the convention."""
        if self.cp_gradient not in CP_GRADIENTS[1:]:
            raise ValueError(
                f"FullRowLosses: cp_gradient must be one of {', '.join(CP_GRADIENTS[1:])}, got "
                f"{self.cp_gradient!r}"
            )

    def __call__(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> Tensor:
        """Communicates over the context-parallel group: losses [b, s] of whole rows.

        Args:
            output: of the model, for this rank's part.
            microbatch: at full width, padded or packed.

        Returns:
            [b, s], the same values on all context-parallel ranks.
        """
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        losses = self.token_losses(output, slice_for_cp(microbatch))
        gather = gather_values if self.cp_gradient == "replicated-value" else GatherAndSum.apply
        order = torch.cat(positions_of_ranks(microbatch, group.size())).argsort()
        return torch.cat(gather(losses, group), dim=1).index_select(1, order)
