"""Megatron-LM: an optimizer that leaves a step without a token alone.

The hook is the method `step` of the one optimizer that is passed; its class is not patched.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_lossagg.aggregator import LossAggregator

_LOGGER = logging.getLogger(__name__)


def skip_empty_steps(optimizer: Any, aggregator: LossAggregator) -> Any:
    """Let `optimizer.step()` do nothing after a batch in which no term that trains has a token.

    The gradient of such a batch is 0, but momentum, weight decay and the learning rate's schedule
    would move on, and MoE auxiliary losses, which nothing divides then, would train alone. What it
    returns, (False, None, None), is what Megatron-LM's `train_step` takes for a skipped iteration.

    Its `step` communicates: a broadcast over tp and one over pp, on every rank.

    Args:
        optimizer: Megatron's optimizer; its method `step` is replaced, once.
        aggregator: the plugin, whose wrapped step ran last.

    Returns:
        The optimizer.
    """
    if getattr(optimizer, "steps_of", None) is aggregator:
        return optimizer
    step = optimizer.step

    def step_unless_empty(*args: Any, **kwargs: Any) -> Any:
        if aggregator.share_is_empty():
            _LOGGER.info("no term that trains has a valid token: the optimizer does not step")
            return False, None, None
        return step(*args, **kwargs)

    optimizer.step = step_unless_empty
    optimizer.steps_of = aggregator
    return optimizer
