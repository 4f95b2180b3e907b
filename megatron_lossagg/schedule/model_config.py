"""The model's config of an aggregator: given, given by a function, or told at the first step."""

from __future__ import annotations

from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from megatron_lossagg.errors import LossAggError


def check_model_config(model_config: Any) -> None:
    """Raise TypeError unless the flag that decides the regime can be read from it."""
    if not hasattr(model_config, "calculate_per_token_loss"):
        raise TypeError(
            "model_config must be the model's TransformerConfig, got "
            f"{type(model_config).__name__} without calculate_per_token_loss. Pass "
            "get_model_config(model), the object that the schedule reads."
        )


class Later(Enum):
    """Stands for a config that is told later."""

    AT_FIRST_STEP = "told at the first step"


AT_FIRST_STEP = Later.AT_FIRST_STEP


class ConfigSource:
    """Where the model's `TransformerConfig` comes from.

    Args:
        model_config: the config, a function without arguments that gives it, or AT_FIRST_STEP.

    Raises:
        TypeError: neither.
    """

    def __init__(self, model_config: Any) -> None:
        self._function = None
        self._config = None
        if isinstance(model_config, FunctionType | MethodType | partial):
            self._function = model_config
        elif model_config is not AT_FIRST_STEP:
            self._set(model_config)

    @property
    def is_known(self) -> bool:
        """Whether it was given: a function is not called before the config is needed."""
        return self._config is not None

    @property
    def config(self) -> Any:
        """The config; a function is called once."""
        if self._config is None and self._function is not None:
            self._set(self._function())
        if self._config is None:
            raise LossAggError(
                "The model's config is not known yet: LossAggregator was built without "
                "model_config. Pass get_model_config(model), or a function that gives it; "
                "make_forward_step of the Megatron-LM adapter takes the model's own at its first "
                "step."
            )
        return self._config

    def set_default(self, model_config: Any) -> None:
        """Take this config unless one was given, or a function that gives it."""
        if self._config is None and self._function is None:
            self._set(model_config)

    def _set(self, model_config: Any) -> None:
        check_model_config(model_config)
        self._config = model_config
