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


@lru_cache
def mtp_loss_is_finite_without_tokens() -> bool:
    """Whether a fully masked microbatch has a finite multi-token prediction gradient (R1, R2).

    There Megatron divides that loss by the tokens of the microbatch. This calls Megatron's own
    function with one masked token. A release that computes the loss inside of the model has no
    such function and, as far as is known, divides by 0. Does not communicate.
    """
    import torch

    try:
        from megatron.core.transformer.multi_token_prediction import (
            MTPLossAutoScaler,
            process_mtp_loss,
        )
    except ImportError:
        return False
    config = SimpleNamespace(
        mtp_num_layers=1,
        mtp_loss_scaling_factor=1.0,
        mtp_detach_heads=False,
        calculate_per_token_loss=False,
    )
    hidden_states = torch.ones(2, 1, 1, requires_grad=True)
    scale = MTPLossAutoScaler.main_loss_backward_scale
    try:
        # The schedule may have left a scale on another device.
        MTPLossAutoScaler.set_loss_scale(torch.ones(()))
        with torch.enable_grad():
            output = process_mtp_loss(
                hidden_states=hidden_states,
                labels=torch.zeros(1, 1, dtype=torch.int64),
                loss_mask=torch.zeros(1, 1),
                output_layer=lambda hidden, **kwargs: (hidden, None),
                output_weight=None,
                runtime_gather_output=None,
                is_training=False,
                compute_language_model_loss=lambda labels, logits: logits[..., 0].t(),
                config=config,
            )
            output.sum().backward()
    except (AttributeError, TypeError):  # a function of another shape: nothing is known of it
        return False
    finally:
        MTPLossAutoScaler.set_loss_scale(scale)
    gradient = hidden_states.grad
    return gradient is not None and bool(torch.isfinite(gradient).all())
