"""Configurations in which a returned loss would not arrive as it should: raised, never guessed."""

from __future__ import annotations

from typing import Any

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.schedule.factors import Regime, ScheduleFactors
from megatron_lossagg.schedule.options import CPGradient
from megatron_lossagg.schedule.probe import (
    mtp_loss_is_finite_without_tokens,
    num_tokens_are_summed_over_cp,
)


def refuse_unproved(model_config: Any, factors: ScheduleFactors) -> None:
    """Raise LossAggError on a pairing of model, schedule and regime that is not exact."""
    regime = factors.regime
    if uses_hybrid_cp(model_config):
        _refuse_hybrid_cp(factors)
    if getattr(model_config, "mtp_num_layers", None) and not regime.uses_per_token_flag:
        _refuse_mtp_over_own_tokens()
    if regime is Regime.R4:
        _refuse_undivided_losses(model_config)
    if regime.divides_by_num_tokens and factors.cp_size > 1:
        _refuse_num_tokens_without_cp()


def _refuse_hybrid_cp(factors: ScheduleFactors) -> None:
    is_local = factors.cp_gradient is CPGradient.LOCAL
    if not (factors.regime.divides_by_num_tokens and is_local):
        raise LossAggError(
            f"hybrid_context_parallel=True in regime {factors.regime}: its schedule runs another "
            "number of samples on every rank, each with its own context-parallel size, and (in "
            "some releases) multiplies a two-value loss by a wrong number, 0. Set "
            "calculate_per_token_loss=True, returns='auto' and cp_gradient='local'."
        )


def _refuse_mtp_over_own_tokens() -> None:
    if not mtp_loss_is_finite_without_tokens():
        raise LossAggError(
            "mtp_num_layers with calculate_per_token_loss=False: the installed Megatron-Core "
            "divides the multi-token prediction loss by the local token count, which gives NaN on "
            "a fully masked microbatch. Set calculate_per_token_loss=True, or use megatron-core "
            "0.17 or newer."
        )


def _refuse_num_tokens_without_cp() -> None:
    if not num_tokens_are_summed_over_cp():
        raise LossAggError(
            "calculate_per_token_loss=True with context parallelism: the installed Megatron-Core "
            "sums num_tokens over data-parallel ranks without context-parallel ones, which leaves "
            "different gradients on them. Set calculate_per_token_loss=False, or use "
            "megatron-core 0.13 or newer."
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


def refuse_deferred(
    model_config: Any,
    specs: list[ModeSpec],
    *,
    normalisers: list[str],
    divides_later: bool,
    masks_are_cp_sliced: bool,
) -> None:
    """Raise LossAggError where one division of all gradients would not give the mode's."""
    if len(specs) > 1:
        modes = ", ".join(spec.loss_agg_mode for spec in specs)
        raise LossAggError(
            f"denominators='deferred' with terms or metrics of several modes or masks ({modes}): "
            "one division cannot serve them all. Use denominators='counted'."
        )
    [spec] = specs
    if spec.mode.divisor is None:
        raise LossAggError(
            f"denominators='deferred' with loss_agg_mode={spec.loss_agg_mode!r}: its weights are "
            "not known up to one common divisor before the batch is complete. Use "
            "denominators='counted'."
        )
    if "units" in normalisers:
        raise LossAggError(
            "denominators='deferred' with a metric over 'units': units are counted before a step, "
            "over all its ranks. Use denominators='counted', or another normaliser."
        )
    if masks_are_cp_sliced:
        raise LossAggError(
            "denominators='deferred' with masks_are_cp_sliced=True: sequences cannot be counted "
            "from parts of them. Wrap an iterator of whole masks and slice with slice_for_cp."
        )
    if not divides_later:
        return
    for size, loss in (("num_moe_experts", "MoE auxiliary"), ("mtp_num_layers", "MTP")):
        if getattr(model_config, size, None):
            raise LossAggError(
                f"denominators='deferred' with {size} set would divide the gradient of the {loss} "
                "loss too. Use denominators='counted', or token-mean with "
                "calculate_per_token_loss=True, which Megatron divides itself."
            )
    if uses_full_iteration_cuda_graph(model_config):
        raise LossAggError(
            "denominators='deferred' divides in finalize_model_grads_func, which a full-iteration "
            "CUDA graph captures. Use denominators='counted'."
        )


def refuse_wrappers(
    chunks: list[Any], regime: Regime, *, scales_gradients: bool, measured: tuple[type, ...] = ()
) -> None:
    """Raise LossAggError if the wrapper of a model chunk cannot be honoured in this regime.

    Args:
        chunks: what Megatron gives `finalize_model_grads_func`.
        regime: that of the step.
        scales_gradients: whether the plugin itself scales gradients at the end.
        measured: wrappers that `ScheduleContract.measure` found exact.

    Raises:
        LossAggError: its gradients would not be scaled as they should, or it is not proved.
    """
    for chunk in chunks:
        names = {cls.__name__ for cls in type(chunk).__mro__}
        if "TorchFullyShardedDataParallel" in names:
            if regime.uses_per_token_flag or scales_gradients:
                raise LossAggError(
                    "TorchFullyShardedDataParallel (torch FSDP2) averages gradients over its ranks "
                    "and its scale_gradients does nothing, so with calculate_per_token_loss=True "
                    "or denominators='deferred' they would not be divided as they should. Set "
                    "calculate_per_token_loss=False and denominators='counted'."
                )
        elif _is_megatron_fsdp(chunk) and type(chunk) not in measured:
            raise LossAggError(
                "Megatron-FSDP is not proved: its sharded gradients need NCCL. Let this job prove "
                "it: LossAggregator(..., contract='measure') with make_forward_step measures when "
                "the first gradients are finalized, also inside pretrain(); in a loop of your own, "
                "call aggregator.measure(model=model_chunks) on every rank between building the "
                "model and the first schedule call. It raises if anything is scaled otherwise. Or "
                "use DistributedDataParallel."
            )


def _is_megatron_fsdp(chunk: Any) -> bool:
    return any(
        cls.__name__ in ("FullyShardedDataParallel", "MegatronFSDP")
        and cls.__module__.startswith("megatron")
        for cls in type(chunk).__mro__
    )


def uses_hybrid_cp(model_config: Any) -> bool:
    """Whether each sample has its own context-parallel size, chosen after the batch is known."""
    return bool(getattr(model_config, "hybrid_context_parallel", False))


def uses_full_iteration_cuda_graph(model_config: Any) -> bool:
    """Whether a replayed step runs without entering Python, so that calls cannot be counted.

    Releases say it in `cuda_graph_scope` or in `cuda_graph_impl`, as a string or an enum.
    """
    scope = getattr(model_config, "cuda_graph_scope", None) or ()
    scopes = [scope] if isinstance(scope, str) else list(scope)
    settings = [*scopes, getattr(model_config, "cuda_graph_impl", None)]
    return any("full_iteration" in str(getattr(s, "name", s)) for s in settings)


def check_p2p_order(model_config: Any, pp_size: int, num_virtual_stages: int) -> None:
    """Raise where an interleaved schedule on two pipeline ranks would mix up its messages.

    With two pipeline ranks both neighbours are the same rank. A batched exchange then posts two
    messages each way between one pair, which backends (gloo and NCCL) match in order of posting:
    activations and gradients change places and the numbers are wrong without an error. The setting
    that is tested is `overlap_p2p_comm` without `batch_p2p_comm`.

    Args:
        model_config: the model's `TransformerConfig`.
        pp_size: pipeline ranks.
        num_virtual_stages: model chunks per rank.

    Raises:
        LossAggError: the config has another setting than the one that is tested.
    """
    overlapped = bool(getattr(model_config, "overlap_p2p_comm", False))
    batched = bool(getattr(model_config, "batch_p2p_comm", True))
    if pp_size == 2 and num_virtual_stages > 1 and not (overlapped and not batched):
        raise LossAggError(
            f"Pipeline size 2 with virtual stages, overlap_p2p_comm={overlapped} and "
            f"batch_p2p_comm={batched}: batched sends and receives between the "
            "same two ranks are matched in order and swap activations with gradients, silently; "
            "one setting is tested. Set overlap_p2p_comm=True and batch_p2p_comm=False in the "
            "model's config, or use another pipeline size."
        )
