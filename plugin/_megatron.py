"""Symbols of Megatron-Core, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any


def megatron(module: str, symbol: str) -> Any:
    """A symbol of Megatron-Core, imported when it is first needed."""
    try:
        return getattr(importlib.import_module(module), symbol)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"megatron_lossagg_plugin.megatron_lm looked for {module}.{symbol} and did not find "
            f"it: {error}. Install megatron-core 0.12 or newer."
        ) from error
