"""What an aggregator does when the schedule finalizes the gradients of one of its steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.config.options import Checks
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import (
    broadcast_from_first,
    communication_device,
    current_groups,
)
from megatron_lossagg.schedule.finalize_hook import FinalizeHook, hook_of
from megatron_lossagg.schedule.refusals import refuse_wrappers
from megatron_lossagg.step.deferred_division import DeferredDivision
from megatron_lossagg.step.settings import Settings
from megatron_lossagg.step.step import Step
from megatron_lossagg.step.stream import WrappedStream
from megatron_lossagg.weights.deferred import sum_over_ranks
from megatron_lossagg.weights.metrics import share_divisors
from megatron_lossagg.weights.step_weights import StepWeights


class Finalizer:
    """Checks the model's wrappers, divides deferred gradients, and validates streamed steps."""

    def __init__(self, settings: Settings, stream: WrappedStream) -> None:
        self._settings = settings
        self._stream = stream
        self._configs: list[Any] = []
        self.measured_wrappers: tuple[type, ...] = ()
        self.before_first_step: Callable[[list[Any]], None] | None = None

    def watch(self, model_config: Any) -> None:
        """From now on, steps are finalized by this config's function, too."""
        if not any(config is model_config for config in self._configs):
            self._configs.append(model_config)
        if self._settings.is_deferred:
            self._divide_in(model_config)

    def has_hook(self) -> bool:
        """Whether the schedule calls this object when it finalizes gradients."""
        return bool(self._hooks())

    def enter(self, *, begins: bool = True) -> None:
        """A step begins, or computes a loss: it takes part when gradients are finalized next."""
        for hook in self._hooks():
            hook.enter(self, begins=begins)

    def leave(self) -> None:
        """The step failed: it takes part in nothing."""
        for hook in self._hooks():
            hook.leave(self)

    def _hooks(self) -> list[FinalizeHook]:
        """Those of the watched configs, put there where they are missing."""
        hooks = [hook_of(config) for config in self._configs]
        return [hook for hook in hooks if hook is not None]

    def _divide_in(self, model_config: Any) -> None:
        hook = hook_of(model_config)
        if hook is not None and hook.division is None and self._settings.may_divide_later:
            hook.division = DeferredDivision(partial(current_groups, self._settings.groups))

    def check_is_set(self, model_config: Any) -> None:
        """Raise LossAggError where deferred gradients would never be divided."""
        finalize = getattr(model_config, "finalize_model_grads_func", None)
        if self._settings.is_deferred and finalize is None:
            raise LossAggError(
                "denominators='deferred' divides in model_config.finalize_model_grads_func, which "
                "is not set. Set it before wrap, as Megatron-LM's train() does: "
                "config.finalize_model_grads_func = finalize_model_grads."
            )

    def before_finalize(self, chunks: list[Any]) -> None:
        """Measure once if that was asked for; raise if a chunk's wrapper cannot be honoured."""
        if self.before_first_step is not None:
            self.before_first_step(chunks)
        contract = self._settings.current_contract()
        refuse_wrappers(
            chunks,
            contract.regime,
            scales_gradients=self._settings.divides_later(contract),
            measured=self.measured_wrappers,
        )

    @property
    def deferred_factor(self) -> Callable[[], float] | None:
        """Counts the deferred step and gives the factor of its gradients; None if none runs."""
        contract = self._settings.current_contract()
        if not self._settings.divides_later(contract):
            return None
        return partial(self._count_and_divide, contract.weights_carry_num_tokens)

    def after_finalize(self, chunks: list[Any], num_tokens: Tensor | None) -> None:
        """`Step.validate`; counts of a deferred step that Megatron divides itself: over dp, tp."""
        groups = self._settings.current_groups()
        if self._settings.is_deferred and groups.is_last_stage:
            contract = self._settings.current_contract()
            if not self._settings.divides_later(contract):
                step, plan = self._count()
                self._divide_reports(step, plan, 1.0)
        step = self._stream.active
        if (
            step is None
            or step.context.forward_only
            or self._settings.options.checks is Checks.SKIPPED
        ):
            return
        self._stream.validate(num_tokens)

    def _count(self) -> tuple[Step | None, StepWeights | None]:
        """Sum the counts of the deferred step, on the last stage, and give them to its plan."""
        step = self._stream.active
        if step is not None and step.is_validated:
            step = None
        plan = None if step is None else step.plan
        sum_over_ranks(plan, self._settings.current_groups())
        return step, plan

    def _count_and_divide(self, divides_by_num_tokens: bool) -> float:
        step, plan = self._count()
        factor = 1.0
        if plan is not None and plan.counts_are_known:
            factor = plan.gradient_factor(divides_by_num_tokens=divides_by_num_tokens)
        groups = self._settings.current_groups()
        # Tensor-parallel ranks without data know counts, but not of which masks.
        box = torch.tensor([factor], dtype=torch.float64)
        box = box.to(communication_device(groups.tp, box.device))
        broadcast_from_first(box, groups.tp)
        [factor] = box.tolist()
        self._divide_reports(step, plan, factor)
        return factor

    def _divide_reports(self, step: Step | None, plan: StepWeights | None, factor: float) -> None:
        """Divide reports of the deferred step: a broadcast over tp of the metrics' divisors."""
        num_metrics = len(self._settings.objective.metric_sums)
        divisors = None
        if num_metrics:
            known = None if plan is None else plan.metric_divisors
            divisors = share_divisors(known, num_metrics, self._settings.current_groups())
        if step is not None:
            step.divide_reports(factor, divisors)
