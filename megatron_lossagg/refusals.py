"""Configurations in which a returned loss would not arrive as it should: raised, never guessed."""

from __future__ import annotations

from typing import Any

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.schedule_probe import num_tokens_are_summed_over_cp


def refuse_unproved(model_config: Any, regime: str, groups: ParallelGroups) -> None:
    """Raise LossAggError on a pairing of model, schedule and regime that is not exact."""
    if getattr(model_config, "hybrid_context_parallel", False):
        raise LossAggError(
            "hybrid_context_parallel=True is not supported: its schedule regroups samples after "
            "the plan was made. Turn it off, or use a fixed context-parallel size."
        )
    _refuse_mtp(model_config, regime)
    if regime == "R4":
        _refuse_undivided_losses(model_config)
    if regime == "R3" and groups.cp_size > 1 and not num_tokens_are_summed_over_cp():
        raise LossAggError(
            "calculate_per_token_loss=True with context parallelism: the installed Megatron-Core "
            "sums num_tokens over data-parallel ranks without context-parallel ones, which leaves "
            "different gradients on them. Set calculate_per_token_loss=False, or use "
            "megatron-core 0.13 or newer."
        )


def _refuse_mtp(model_config: Any, regime: str) -> None:
    if getattr(model_config, "mtp_num_layers", None) and regime in ("R1", "R2"):
        raise LossAggError(
            "mtp_num_layers with calculate_per_token_loss=False: Megatron divides the multi-token "
            "prediction loss by the local token count, which gives NaN on a fully masked "
            "microbatch. Set calculate_per_token_loss=True."
        )


def _refuse_undivided_losses(model_config: Any) -> None:
    """R4: finalize divides by nothing, so losses that Megatron adds itself stay sums."""
    for what, size, hook in (
        ("MoE auxiliary", "num_moe_experts", "moe_grad_scale_func"),
        ("multi-token prediction", "mtp_num_layers", "mtp_grad_scale_func"),
    ):
        if getattr(model_config, size, None) and getattr(model_config, hook, None) is None:
            raise LossAggError(
                f"returns='loss' with calculate_per_token_loss=True and {size} set: the {what} "
                f"loss would go undivided. Use returns='auto' (three values), or set {hook} in the "
                "model's config (megatron-core 0.19 on) to scale it."
            )


def check_p2p_order(model_config: Any, groups: ParallelGroups) -> None:
    """Raise where an interleaved schedule on two pipeline ranks would mix up its messages.

    With two pipeline ranks both neighbours are the same rank. A batched exchange then posts several
    messages between one pair, which backends match in order of posting: activations and gradients
    change places and the numbers are wrong without an error.
    """
    interleaved = groups.num_virtual_stages > 1
    overlapped = bool(getattr(model_config, "overlap_p2p_comm", False))
    if groups.pp_size == 2 and interleaved and not overlapped:
        raise LossAggError(
            "Pipeline size 2 with virtual stages and overlap_p2p_comm=False: batched sends and "
            "receives between the same two ranks are matched in order and swap activations with "
            "gradients, silently. Set overlap_p2p_comm=True and batch_p2p_comm=False in the "
            "model's config."
        )
