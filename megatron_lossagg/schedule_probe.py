"""Ask the installed Megatron-Core what it does, instead of reading its version number."""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import SimpleNamespace
from typing import Any


@lru_cache
def three_values_are_multiplied_by_cp(cp_size: int) -> bool:
    """Whether the schedule multiplies a three-value loss by C (R2). Does not communicate.

    Calls Megatron's own function with a loss of 1, one token and one microbatch, and looks at what
    is left of the 1. Only a rank of the last pipeline stage can ask.
    """
    import torch
    from megatron.core.pipeline_parallel import schedules

    loss = torch.ones((), dtype=torch.float64)

    def loss_func(output_tensor: Any) -> Any:
        return loss, torch.ones((), dtype=torch.int), {}

    config = SimpleNamespace(
        calculate_per_token_loss=False, timers=None, enable_autocast=False, grad_scale_func=None
    )
    calc_loss = getattr(schedules, "forward_step_calc_loss", None)
    if calc_loss is not None:
        calc_loss(
            SimpleNamespace(),
            loss,
            loss_func,
            config,
            None,
            False,
            1,
            [],
            cp_group_size=cp_size,
            is_last_stage=True,
        )
    else:
        model = SimpleNamespace(
            set_input_tensor=lambda tensors: None, model_type=None, config=config
        )
        schedules.forward_step(
            lambda data_iterator, model: (loss, loss_func), None, model, 1, None, [], config
        )
    # Rescaled in place, as every release does with what a loss_func returns.
    return loss.item() != 1.0


@lru_cache
def num_tokens_are_summed_over_cp() -> bool:
    """Whether finalize sums num_tokens over data x context parallel ranks (R3).

    Read from the source of Megatron's function: trying it would communicate. A release that keeps
    no source is taken to be a recent one.
    """
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    try:
        source = inspect.getsource(finalize_model_grads)
    except (OSError, TypeError):
        return True
    return "dp_cp" in source or "with_context_parallel=True" in source
