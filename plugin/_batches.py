"""Megatron-LM: what `get_batch` of a script returns, as a dict.

The script's function is called as it is, with the arguments that it takes; it is not patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._megatron import megatron

Batch = Mapping[str, Any]

# What `get_batch` of `pretrain_gpt.py` returns, by the number of its values.
_BATCH_KEYS = {
    # Up to Core 0.15.
    5: ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"),
    # 0.16 and 0.17.
    6: ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params"),
    # Since 0.18, its BATCH_KEYS.
    10: (
        "attention_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
        "hybrid_cp_group",
        "labels",
        "local_cp_size",
        "loss_mask",
        "max_seqlen",
        "position_ids",
        "tokens",
    ),
}


def named(batch: Any, batch_keys: Sequence[str] | None) -> Batch:
    """What `get_batch` returned, as a dict."""
    if batch is None:
        return {}
    if isinstance(batch, Mapping):
        return batch
    values = tuple(batch)
    keys = _BATCH_KEYS.get(len(values)) if batch_keys is None else tuple(batch_keys)
    if keys is None or len(keys) != len(values):
        known = ", ".join(map(str, _BATCH_KEYS)) if keys is None else str(len(keys))
        raise ValueError(
            f"get_batch returned {len(values)} values, expected a dict or {known} values. Pass "
            "batch_keys=(...) with a name for each; the loss mask must be called 'loss_mask'."
        )
    return dict(zip(keys, values, strict=True))


def with_vp_stage(get_batch: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """`get_batch` as a function of iterator and model; up to 0.14 it took no `vp_stage`."""
    try:
        parameters = list(inspect.signature(get_batch).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = [p.kind for p in parameters if p.kind is not p.KEYWORD_ONLY]
    takes_stage = len(kinds) != 1 or kinds[0] is inspect.Parameter.VAR_POSITIONAL

    def call(data_iterator: Any, model: Any) -> Any:
        if not takes_stage:
            return get_batch(data_iterator)
        get_attribute = megatron("megatron.core.utils", "get_attr_wrapped_model")
        try:
            vp_stage = get_attribute(model, "vp_stage")
        except RuntimeError:
            vp_stage = None
        return get_batch(data_iterator, vp_stage)

    return call
