"""What a `loss_fn` returned: token losses, and values of the metrics that its term declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.objective.terms import LossTerm
from megatron_lossagg.weights.metrics import EXTREMES


def checked_result(
    result: Any,
    term: LossTerm,
    weights: Tensor,
    *,
    where: str,
    rows_are_sequences: bool,
    is_packed: bool,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """(token losses [b, s], {metric: values [b, s] or [b]}) of a term. Looks at no value.

    Args:
        result: what the term's `loss_fn` returned: losses, or (losses, {metric: values}).
        term: it declares the metrics.
        weights: [b, s], those of the term.
        where: names the term in a message.
        rows_are_sequences: whether a row of this rank is not sliced over context-parallel ranks.
        is_packed: whether a row holds several sequences.

    Returns:
        The losses, and the values of each metric by name.

    Raises:
        TypeError: another dtype, or no tensor.
        ValueError: other metrics than the declared ones, or another shape.
        LossAggError: a metric per row, where rows are no whole sequences.
    """
    losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(metrics, Mapping) or set(metrics) != set(term.metrics):
        names = sorted(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
        raise ValueError(
            f"loss_fn{where} returned the metrics {names}, but declared are "
            f"{sorted(term.metrics)}: return (losses, {{name: values}}) with these names."
        )
    check_token_losses(losses, weights, where=where)
    for name, values in metrics.items():
        check_metric(
            values,
            weights,
            name,
            term.metrics[name],
            rows_are_sequences=rows_are_sequences,
            is_packed=is_packed,
        )
    return losses, metrics


def check_token_losses(losses: Any, weights: Tensor, where: str = "") -> None:
    """Refuse losses other than one floating-point number per token. Looks at no value.

    Args:
        losses: what a `loss_fn` returned.
        weights: [b, s], those of its term.
        where: names the term in the message.

    Raises:
        TypeError: no tensor, a nested one, or no floating-point numbers.
        ValueError: another shape than that of the weights.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"loss_fn{where} must return a tensor of per-token losses, got {type(losses).__name__}."
        )
    if losses.is_nested:
        raise TypeError(
            f"loss_fn{where} returned a nested tensor; return one of the weights' shape "
            f"{tuple(weights.shape)}: torch.nested.to_padded_tensor(losses, 0, weights.shape)."
        )
    if losses.shape != weights.shape:
        hint = (
            "It looks reduced already: return the loss of every token and leave the sum to the "
            "plugin."
            if losses.dim() < weights.dim()
            else "If context parallelism is on, slice mask, weights and labels together with "
            "slice_for_cp; otherwise check the mask's width."
        )
        raise ValueError(
            f"loss_fn{where} returned losses of shape {tuple(losses.shape)}, but the microbatch's "
            f"weights (its mask) have shape {tuple(weights.shape)}. {hint}"
        )
    if not losses.is_floating_point():
        raise TypeError(f"loss_fn{where} must return floating-point losses, got {losses.dtype}.")


def check_metric(
    values: Any,
    weights: Tensor,
    name: str,
    normaliser: str,
    *,
    rows_are_sequences: bool,
    is_packed: bool,
) -> None:
    """Raise unless `values` holds one number per token, or per sequence. Looks at no value.

    Args:
        values: what `loss_fn` returned.
        weights: [b, s], the weights of its term.
        name: of the metric.
        normaliser: of the metric.
        rows_are_sequences: whether a row of this rank is not sliced over context-parallel ranks.
        is_packed: whether it holds several sequences.

    Raises:
        TypeError: no tensor, or complex numbers.
        ValueError: another shape, or one that the normaliser does not take.
        LossAggError: a value per row, where rows are no whole sequences.
    """
    if not isinstance(values, Tensor):
        raise TypeError(
            f"loss_fn returned a {type(values).__name__} as metric {name!r}: return a tensor of "
            f"one value per token, {tuple(weights.shape)}, not reduced."
        )
    if values.is_complex():
        raise TypeError(f"metric {name!r} holds {values.dtype}: return real numbers or bools.")
    if values.shape == weights.shape:
        return
    if is_packed:
        raise ValueError(
            f"metric {name!r} has shape {tuple(values.shape)}, but its term's mask has "
            f"{tuple(weights.shape)}. In packed data (cu_seqlens) return one value per token: of a "
            "value per sequence, that over the number of its valid tokens, declared as 'sequences'."
        )
    if values.shape != weights.shape[:1]:
        raise ValueError(
            f"metric {name!r} has shape {tuple(values.shape)}, but its term's mask has "
            f"{tuple(weights.shape)}: return one value per token, or one per sequence, "
            f"[{weights.shape[0]}]; leave sums and means to the plugin."
        )
    if normaliser == "tokens":
        raise ValueError(
            f"metric {name!r} has one value per sequence, {tuple(values.shape)}, but is declared "
            "as 'tokens', a mean over tokens. Declare it as 'sequences', or return [b, s]."
        )
    if not rows_are_sequences and normaliser not in EXTREMES:
        raise LossAggError(
            f"metric {name!r} has one value per row, {tuple(values.shape)}, but a row of this rank "
            "is no whole sequence (it is sliced over context-parallel ranks), so it would be "
            "counted on several ranks. Return it per token, as its value over the number of valid "
            "tokens of the sequence, declared as 'sequences'."
        )
