"""Measure the schedule of a layout on bench ranks."""

from __future__ import annotations

from megatron_lossagg.groups import ParallelGroups
from megatron_lossagg.schedule.contract import ScheduleContract
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT, transformer_config
from megatron_lossagg.testing.ranks.parallel import initialize_model_parallel


def measured_ratio(
    layout: Layout,
    calculate_per_token_loss: bool,
    returns: str = "auto",
    cp_gradient: str = "local",
) -> float:
    """Communicates over all groups of `layout`: the measured gradient over the right one.

    Args:
        layout: sizes of the groups.
        calculate_per_token_loss: Megatron's flag of that name.
        returns: see `ScheduleContract.detect`.
        cp_gradient: see `ScheduleContract.detect`.

    Returns:
        1.0, up to rounding.

    Raises:
        LossAggError: it is not 1, or the setting is refused.
    """
    initialize_model_parallel(layout)
    config = transformer_config(
        TinyGPT(num_layers=layout.pp * layout.vpp),
        layout,
        calculate_per_token_loss=calculate_per_token_loss,
    )
    groups = ParallelGroups.from_megatron()
    found = ScheduleContract.measure(config, groups, returns=returns, cp_gradient=cp_gradient)
    num_tokens = 1
    if found.contract.weights_carry_num_tokens:
        num_tokens = found.num_microbatches * groups.dp_cp_size
    return found.factor * found.contract.loss_factor(found.num_microbatches) * num_tokens
