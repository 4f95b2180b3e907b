"""What an aggregator does when the schedule finalizes gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_lossagg.deferred import DeferredPlan, gradient_factor, sum_over_ranks
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.finalize_hook import install_finalize_hook
from megatron_lossagg.refusals import refuse_wrappers
from megatron_lossagg.settings import Settings
from megatron_lossagg.stream import WrappedStream


class Finalizer:
    """Checks the model's wrappers, divides deferred gradients, and validates streamed steps."""

    def __init__(self, settings: Settings, stream: WrappedStream) -> None:
        self._settings = settings
        self._stream = stream
        self.measured_wrappers: tuple[type, ...] = ()

    def install(self, model_config: Any) -> None:
        """Make `model_config.finalize_model_grads_func` call this object, once."""
        finalize = getattr(model_config, "finalize_model_grads_func", None)
        if self._settings.is_deferred and finalize is None:
            raise LossAggError(
                "denominators='deferred' divides in model_config.finalize_model_grads_func, which "
                "is not set. Set it before wrap, as Megatron-LM's train() does: "
                "config.finalize_model_grads_func = finalize_model_grads."
            )
        install_finalize_hook(model_config, self)

    def before_finalize(self, chunks: list[Any]) -> None:
        """Raise LossAggError if the wrapper of a model chunk cannot be honoured."""
        contract = self._settings.current_contract()
        refuse_wrappers(
            chunks,
            contract.regime,
            scales_gradients=self._settings.divides_later(contract),
            measured=self.measured_wrappers,
        )

    def after_finalize(self, chunks: list[Any], num_tokens: Tensor | None) -> None:
        """Divide deferred gradients (communicates over dp, tp and pp), then `Step.validate`."""
        contract = self._settings.current_contract()
        if self._settings.divides_later(contract):
            self._divide(chunks, contract.regime)
        self._stream.validate(num_tokens)

    def _divide(self, chunks: list[Any], regime: str) -> None:
        step = self._stream.active
        plan = None if step is None else step.plan
        assert plan is None or isinstance(plan, DeferredPlan)
        pending = sum_over_ranks(plan, self._settings.current_groups())
        factor = gradient_factor(self._settings.main_spec, regime, pending.wait())
        for chunk in chunks:
            chunk.scale_gradients(factor)
        if plan is not None:
            plan.settle(pending)
        if step is not None:
            step.divide_reports(factor)
