"""The modes `length-power-A`: a token's weight falls with its sequence's length to the power A.

    w = n_s^-A / B        sum of w: not told by counts, so the plan's weights are compared

n_s are the valid tokens of sequence s, B the sequences of the global batch (`sequence_count`).
A = 0 is `seq-mean-token-sum`, A = 1 is `seq-mean-token-mean`; between them long sequences get less
weight per token than short ones, but more in total.

How this relates to Delta L Normalization (He et al. 2025, arXiv:2509.07558; its authors' code in
github.com/zerolllin/Delta-L-Normalization): within one batch the weights are proportional to its
weights, `n_s^-A / (L * sum_j n_j^-A)` with a constant L, but the factor between them,
`L * mean_j(n_j^-A)`, changes from batch to batch with the lengths. Its estimator is unbiased
because of that sum, so this mode is another objective and does not have its name. The sum is one of
real numbers over all ranks, which the integer counts do not hold. Where the lengths of the batch
are known before training, as on a driver, Delta L Normalization is exactly `loss_agg_mode=
"seq-mean-token-sum-norm"`, `norm_semantics="seq-mean"`, `loss_scale_factor=L` on token losses (or
advantages) multiplied by `n_s^-A / mean_j(n_j^-A)`, which is how its authors' code does it.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lossagg.modes.table import Formula

PREFIX = "length-power-"
MAX_EXPONENT = 4.0


def mode_name(exponent: float) -> str:
    """The `loss_agg_mode` of an exponent: 0.5 is "length-power-0.5".

    Args:
        exponent: A, from 0 to 4.

    Returns:
        The name.

    Raises:
        ValueError: the exponent is not within 0 to 4: longer sequences would weigh more per token,
            or less than a float32 weight can tell from zero.
    """
    if not 0 <= exponent <= MAX_EXPONENT:
        raise ValueError(
            f"length-power: the exponent must be a number from 0 to {MAX_EXPONENT:g}, got "
            f"{exponent}."
        )
    return f"{PREFIX}{exponent:.12g}"


def exponent_of(loss_agg_mode: str) -> float | None:
    """A of "length-power-A"; None if the mode has another name.

    Args:
        loss_agg_mode: the name of a mode.

    Returns:
        A, or None.

    Raises:
        ValueError: A is no number from 0 to 4, or written in another way than `mode_name` does
            (ranks compare modes by their names).
    """
    if not loss_agg_mode.startswith(PREFIX):
        return None
    text = loss_agg_mode.removeprefix(PREFIX)
    try:
        exponent = float(text)
    except ValueError:
        raise ValueError(
            f"loss_agg_mode={loss_agg_mode!r}: {text!r} is no number; write for example "
            f"'{PREFIX}0.5'."
        ) from None
    expected = mode_name(exponent)
    if loss_agg_mode != expected:
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r}: write it {expected!r}.")
    return exponent


def formula_of(exponent: str) -> Formula:
    """In symbols, for a number or "A"."""
    return Formula(f"n_s^-{exponent} / B", None, ("sequence_count",))


def length_power(num_tokens: Tensor, exponent: float) -> Tensor:
    """n^-A, float64 [n]; 1 for a sequence without tokens, whose weight is not used."""
    return num_tokens.clamp(min=1).pow(-exponent)
