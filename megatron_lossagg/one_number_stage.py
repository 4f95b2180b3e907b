"""A pipeline stage of one number, the smallest model that Megatron's schedules run.

The measurement of a schedule (`schedule.measure`) and the scalar model of the test bench
(`testing.model.scalar_model`) are built of it. They share no other code, so it lies below both.
Megatron is imported when a stage is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StagePlace:
    """Where a stage stands in a pipeline of pp_size * num_virtual_stages stages."""

    pp_rank: int
    pp_size: int
    vp_stage: int
    num_virtual_stages: int

    @property
    def index(self) -> int:
        """Its number, from the first stage on."""
        return self.vp_stage * self.pp_size + self.pp_rank

    @property
    def is_first(self) -> bool:
        """Whether it gets its input from the caller."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether its output meets the loss."""
        return self.index == self.pp_size * self.num_virtual_stages - 1


def one_number_stage(
    config: Any,
    place: StagePlace,
    name: str,
    number: Tensor,
    *,
    first_input: Callable[..., Tensor],
    last_output: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> Any:
    """A `MegatronModule` that multiplies what it gets by one parameter. Does not communicate.

    Args:
        config: the model's `TransformerConfig`.
        place: of the stage.
        name: of the parameter.
        number: its value, a tensor of one element; its dtype and device are the stage's.
        first_input: makes [s, b, h], what Megatron's pipeline carries, of the arguments that the
            first stage is called with.
        last_output: makes the model's output of the last stage's [s, b, h].

    Returns:
        The stage.
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class OneNumberStage(MegatronModule):
        """Its input times a number."""

        def __init__(self) -> None:
            super().__init__(config=config)
            self.model_type = ModelType.encoder_or_decoder
            self.share_embeddings_and_output_weights = False
            self.pre_process = place.is_first
            self.post_process = place.is_last
            self.vp_stage = place.vp_stage if place.num_virtual_stages > 1 else None
            self.input_tensor: Tensor | None = None
            self.register_parameter(name, torch.nn.Parameter(number))

        def set_input_tensor(self, input_tensor: Any) -> None:
            """What the schedule received from the stage before."""
            self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

        def forward(self, *inputs: Any) -> Tensor:
            """[s, b, h] between stages, `last_output` of it out of the last one."""
            [scale] = self.parameters()
            hidden = first_input(*inputs) if self.pre_process else self.input_tensor
            assert hidden is not None
            hidden = hidden * scale
            return last_output(hidden) if self.post_process else hidden

    return OneNumberStage()
