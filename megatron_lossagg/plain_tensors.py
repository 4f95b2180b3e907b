"""Data comes as plain tensors in dicts; what to do with lists, nested tensors and TensorDicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_OF_SEQUENCES = ("[b]", "[num_seqs]", "[num_seqs + 1]")


def check_plain_tensor(value: Any, name: str, shape: str) -> None:
    """Refuse what is no tensor, or a nested one. Looks at no value.

    Args:
        value: what a caller passed.
        name: what it is called.
        shape: the shape that is expected, such as "[b, s]".

    Raises:
        TypeError: `value` is not a tensor, or is nested; the message says how to make a plain one.
    """
    if not isinstance(value, Tensor):
        of_tensors = (
            isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value)
        )
        raise TypeError(
            f"{name} must be a tensor, got {type(value).__name__}"
            + (f" of tensors. Pass one {shape}: {_from_rows(name, shape)}." if of_tensors else ".")
        )
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, whose rows differ in length. Pass a plain one {shape}: "
            f"{_from_nested(name, shape)}."
        )


def _from_rows(name: str, shape: str) -> str:
    if shape not in _OF_SEQUENCES:
        return f"torch.nn.utils.rnn.pad_sequence({name}, batch_first=True), which pads with 0"
    return f"torch.stack({name}) or torch.cat({name})"


def _from_nested(name: str, shape: str) -> str:
    if shape not in _OF_SEQUENCES:
        return f"torch.nested.to_padded_tensor({name}, 0), as long as the microbatch's other fields"
    return f"{name}.values() of a jagged one"


def dict_hint(microbatch: Any) -> str:
    """What a message adds on an object that is no mapping, but has its methods: a TensorDict."""
    is_alike = not isinstance(microbatch, Mapping) and all(
        callable(getattr(microbatch, method, None)) for method in ("keys", "items")
    )
    return " Pass dict(microbatch.items())." if is_alike else ""
