"""A loss aggregation mode is a name and a factor per sequence, computed from counts.

Let T be the valid tokens, B the sequences of the global batch, n_s the valid tokens of sequence s
and L the `loss_scale_factor`. Every mode is a weight per valid token,
`J = sum_s sum_t w_st * l_st`:

    token-mean                                  w = 1 / T            sum of w = 1
    token-sum                                   w = 1                sum of w = T
    seq-mean-token-sum                          w = 1 / B            sum of w = T / B
    seq-mean-token-mean                         w = 1 / (B * n_s)    sum of w = B_valid / B
    seq-mean-token-sum-norm, "sum"              w = 1 / L            sum of w = T / L
    seq-mean-token-sum-norm, "seq-mean"         w = 1 / (B * L)      sum of w = T / (B * L)
    unit-mean-token-sum                         w = 1 / U                  sum of w = T / U
    unit-mean-token-mean                        w = 1 / (U * T_u)          sum of w = U_valid / U
    unit-mean-seq-mean-token-mean               w = 1 / (U * B_u * n_s)    sum of w = U_valid / U
    length-power-A, A from 0 to 4               w = n_s^-A / B             (`length_power.py`)

U is the number of units (rollouts of several samples, or a prompt's answers), T_u and B_u the valid
tokens and valid sequences of the sequence's unit, over the global batch. `sequence_count` says
whether B and U count those with a valid token, or all of them.

The weight is the same for every valid token of a sequence, so a mode is a function that returns one
factor per sequence. A count of zero gives a weight of zero, never a division by zero.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from megatron_lossagg.global_counts import GlobalCounts
from megatron_lossagg.length_power import exponent_of, length_power, mode_name

SEQUENCE_COUNTS = ("valid", "nominal")
NORM_SEMANTICS = ("sum", "seq-mean")


@dataclass(frozen=True)
class ModeInputs:
    """What a mode may depend on; all counts as float64 tensors on the mask's device.

    Attributes:
        num_tokens: T, shape [].
        num_seqs: B, shape []; valid or nominal sequences, by `sequence_count`.
        num_valid_seqs: sequences with at least one valid token, shape [].
        loss_scale_factor: L, or None where the mode does not need one.
        norm_semantics: "sum" or "seq-mean".
        num_units: U, shape []; units with a valid token or all of them, by `sequence_count`. None
            in modes without units.
        num_valid_units: units with a valid token, shape [].
        unit_num_tokens: T_u of each sequence's unit, [n].
        unit_num_seqs: B_u of each sequence's unit, [n].
    """

    num_tokens: Tensor
    num_seqs: Tensor
    num_valid_seqs: Tensor
    loss_scale_factor: float | None
    norm_semantics: str
    num_units: Tensor | None = None
    num_valid_units: Tensor | None = None
    unit_num_tokens: Tensor | None = None
    unit_num_seqs: Tensor | None = None


@dataclass(frozen=True)
class AggregationMode:
    """A named mode.

    Attributes:
        name: the value of `loss_agg_mode`.
        sequence_factor: (n_s as float64 [num_rows], ModeInputs) -> the weight of a valid token of
            each sequence, float64, broadcastable to [num_rows].
        checksum: ModeInputs -> the sum of all weights of the global batch, float64, shape []; None
            if the counts do not tell it: then every step's weights are compared with the plan's.
        needs_units: whether sequences must carry `unit_ids`.
        divisor: ModeInputs -> the global count that every weight is divided by, float64, shape [],
            so that the weights are known up to that one number before the batch is complete. None:
            weights depend on the global batch in another way too.
    """

    name: str
    sequence_factor: Callable[[Tensor, ModeInputs], Tensor]
    checksum: Callable[[ModeInputs], Tensor] | None = None
    needs_units: bool = False
    divisor: Callable[[ModeInputs], Tensor] | None = None


def reciprocal_or_zero(count: Tensor) -> Tensor:
    """1 / count where count > 0, else 0, without a branch on data. Shape and dtype of `count`."""
    return (count > 0).to(count.dtype) / count.clamp(min=1)


def _norm_divisor_reciprocal(inputs: ModeInputs) -> Tensor:
    """1 / L, or 1 / (B * L) with `norm_semantics="seq-mean"`."""
    assert inputs.loss_scale_factor is not None  # ModeSpec has checked it
    if inputs.norm_semantics == "sum":
        return torch.full_like(inputs.num_tokens, 1.0 / inputs.loss_scale_factor)
    return reciprocal_or_zero(inputs.num_seqs) / inputs.loss_scale_factor


def _number_of_units_reciprocal(inputs: ModeInputs) -> Tensor:
    """1 / U."""
    assert inputs.num_units is not None  # ModeSpec has checked it
    return reciprocal_or_zero(inputs.num_units)


def _valid_share_of_units(inputs: ModeInputs) -> Tensor:
    """U_valid / U."""
    assert inputs.num_valid_units is not None
    return inputs.num_valid_units * _number_of_units_reciprocal(inputs)


def _unit_mean(inputs: ModeInputs, unit_count: Tensor | None) -> Tensor:
    """1 / (U * count of the sequence's unit), [n]."""
    assert unit_count is not None
    return _number_of_units_reciprocal(inputs) * reciprocal_or_zero(unit_count)


_MODES = {
    mode.name: mode
    for mode in (
        AggregationMode(
            "token-mean",
            lambda n_s, c: reciprocal_or_zero(c.num_tokens),
            lambda c: (c.num_tokens > 0).to(torch.float64),
            divisor=lambda c: c.num_tokens,
        ),
        AggregationMode(
            "token-sum",
            lambda n_s, c: torch.ones_like(c.num_tokens),
            lambda c: c.num_tokens,
            divisor=lambda c: torch.ones_like(c.num_tokens),
        ),
        AggregationMode(
            "seq-mean-token-sum",
            lambda n_s, c: reciprocal_or_zero(c.num_seqs),
            lambda c: c.num_tokens * reciprocal_or_zero(c.num_seqs),
            divisor=lambda c: c.num_seqs,
        ),
        AggregationMode(
            "seq-mean-token-mean",
            lambda n_s, c: reciprocal_or_zero(c.num_seqs) * reciprocal_or_zero(n_s),
            lambda c: c.num_valid_seqs * reciprocal_or_zero(c.num_seqs),
            divisor=lambda c: c.num_seqs,
        ),
        AggregationMode(
            "seq-mean-token-sum-norm",
            lambda n_s, c: _norm_divisor_reciprocal(c),
            lambda c: c.num_tokens * _norm_divisor_reciprocal(c),
            divisor=lambda c: (
                torch.ones_like(c.num_tokens) if c.norm_semantics == "sum" else c.num_seqs
            ),
        ),
        AggregationMode(
            "unit-mean-token-sum",
            lambda n_s, c: _number_of_units_reciprocal(c),
            lambda c: c.num_tokens * _number_of_units_reciprocal(c),
            needs_units=True,
        ),
        AggregationMode(
            "unit-mean-token-mean",
            lambda n_s, c: _unit_mean(c, c.unit_num_tokens),
            _valid_share_of_units,
            needs_units=True,
        ),
        AggregationMode(
            "unit-mean-seq-mean-token-mean",
            lambda n_s, c: _unit_mean(c, c.unit_num_seqs) * reciprocal_or_zero(n_s),
            _valid_share_of_units,
            needs_units=True,
        ),
    )
}


def mode_names() -> tuple[str, ...]:
    """The known values of `loss_agg_mode`, without those of `length_power`."""
    return tuple(_MODES)


_BUILT_IN = tuple(_MODES)


def registered_names() -> tuple[str, ...]:
    """The modes that `register_mode` added, in this process or in a module to import."""
    _import_registered()
    return tuple(name for name in _MODES if name not in _BUILT_IN)


def register_mode(
    name: str,
    sequence_factor: Callable[[Tensor, ModeInputs], Tensor],
    *,
    checksum: Callable[[ModeInputs], Tensor] | None = None,
    divisor: Callable[[ModeInputs], Tensor] | None = None,
    needs_units: bool = False,
) -> AggregationMode:
    """Add a mode of your own, which then works wherever a `loss_agg_mode` is named.

        register_mode("sqrt-length", lambda n_s, c: 1 / (c.num_seqs * n_s.sqrt()))

    Every rank must register it, and a command line finds it through the environment variable
    `MEGATRON_LOSSAGG_IMPORT`, a comma-separated list of modules to import.

    Args:
        name: its `loss_agg_mode`.
        sequence_factor: (n_s float64 [n], ModeInputs) -> the weight of a valid token of each
            sequence, float64, broadcastable to [n]. What it gives for n_s = 0 is not used.
        checksum: see `AggregationMode`.
        divisor: see `AggregationMode`; without it the mode cannot be deferred.
        needs_units: see `AggregationMode`.

    Raises:
        ValueError: a mode of that name exists. TypeError: no text, or nothing callable.
    """
    if not isinstance(name, str) or not name or not callable(sequence_factor):
        raise TypeError(
            "register_mode expects a name and a function (n_s, counts) -> weight per sequence, got "
            f"{name!r} and {type(sequence_factor).__name__}."
        )
    mode = AggregationMode(name, sequence_factor, checksum, needs_units, divisor)
    if name in _MODES or exponent_of(name) is not None:
        raise ValueError(f"register_mode: {name!r} exists already; choose another name.")
    _MODES[name] = mode
    return mode


def _import_registered() -> None:
    """Import the modules that register modes, once."""
    names = os.environ.get("MEGATRON_LOSSAGG_IMPORT", "")
    for module in filter(None, (name.strip() for name in names.split(","))):
        importlib.import_module(module)


def _length_power_mode(exponent: float) -> AggregationMode:
    """n_s^-A / B."""
    return AggregationMode(
        mode_name(exponent),
        lambda n_s, c: length_power(n_s, exponent) * reciprocal_or_zero(c.num_seqs),
        divisor=lambda c: c.num_seqs,
    )


def get_mode(loss_agg_mode: str) -> AggregationMode:
    """Look a mode up by name; raises ValueError naming the known ones."""
    exponent = exponent_of(loss_agg_mode) if isinstance(loss_agg_mode, str) else None
    if exponent is not None:
        return _length_power_mode(exponent)
    if isinstance(loss_agg_mode, str) and loss_agg_mode not in _MODES:
        _import_registered()
    if not isinstance(loss_agg_mode, str) or loss_agg_mode not in _MODES:
        raise ValueError(
            f"Unknown loss_agg_mode {loss_agg_mode!r}; expected one of {', '.join(_MODES)}, or "
            "length-power-A with a number A."
        )
    return _MODES[loss_agg_mode]


def check_norm_semantics(norm_semantics: str) -> None:
    """Raise ValueError unless `norm_semantics` is one of `NORM_SEMANTICS`."""
    if norm_semantics not in NORM_SEMANTICS:
        raise ValueError(
            f"norm_semantics={norm_semantics!r} does not exist; expected 'sum' (masked sum / L, "
            "verl up to 0.7) or 'seq-mean' (masked sum / (B * L), verl since 2026-02 and TRL "
            "dr_grpo)."
        )


def check_loss_scale_factor(loss_scale_factor: float) -> None:
    """Raise unless L is a number above zero whose reciprocal a float32 weight can hold."""
    if isinstance(loss_scale_factor, bool) or not isinstance(loss_scale_factor, Real):
        raise TypeError(
            f"loss_scale_factor must be a number, got {loss_scale_factor!r} of type "
            f"{type(loss_scale_factor).__name__}."
        )
    if not 1e-30 <= loss_scale_factor <= 1e30:
        raise ValueError(
            f"loss_scale_factor={loss_scale_factor} cannot divide a loss; pass a finite number > "
            "0 (and within 1e-30 to 1e30), usually the maximum response length."
        )


@dataclass(frozen=True)
class ModeSpec:
    """A mode with the options that fix its weights; validated when built.

    Attributes:
        loss_agg_mode: name of the mode.
        loss_scale_factor: L of `seq-mean-token-sum-norm` (required there), a number > 0.
        norm_semantics: "sum" or "seq-mean"; only `seq-mean-token-sum-norm` reads it.
        sequence_count: which sequences are B: "valid" (n_s > 0) or "nominal" (every row that
            `sample_mask` does not mark as padding); and which units are U: "valid" (T_u > 0) or
            "nominal" (every one of the `num_units`).
    """

    loss_agg_mode: str
    loss_scale_factor: float | None = None
    norm_semantics: str = "sum"
    sequence_count: str = "valid"

    def __post_init__(self) -> None:
        get_mode(self.loss_agg_mode)
        check_norm_semantics(self.norm_semantics)
        if self.sequence_count not in SEQUENCE_COUNTS:
            raise ValueError(
                f"sequence_count={self.sequence_count!r} does not exist; expected 'valid' or "
                "'nominal'."
            )
        if self.loss_scale_factor is not None:
            check_loss_scale_factor(self.loss_scale_factor)
            # 4, 4.0 and numpy's 4 are one configuration: ranks compare specs by their text.
            object.__setattr__(self, "loss_scale_factor", float(self.loss_scale_factor))
        elif self.loss_agg_mode == "seq-mean-token-sum-norm":
            raise ValueError(
                "loss_agg_mode='seq-mean-token-sum-norm' needs loss_scale_factor, a number > 0: "
                "the mask of a Megatron microbatch includes the prompt and padding, so its width "
                "is no usable default. Pass the maximum response length."
            )

    def inputs(
        self, counts: GlobalCounts, device: torch.device, unit_of_seq: Tensor | None = None
    ) -> ModeInputs:
        """The counts as float64 tensors on `device`, with B chosen by `sequence_count`.

        `unit_of_seq` [n] picks each sequence's unit in modes with units.
        """
        counts = counts.to(device)
        num_seqs = counts.num_valid_seqs if self.sequence_count == "valid" else counts.num_seqs
        inputs = ModeInputs(
            num_tokens=counts.num_tokens.double(),
            num_seqs=num_seqs.double(),
            num_valid_seqs=counts.num_valid_seqs.double(),
            loss_scale_factor=self.loss_scale_factor,
            norm_semantics=self.norm_semantics,
        )
        if counts.unit_num_tokens is not None:
            num_valid_units = (counts.unit_num_tokens > 0).sum().double()
            num_all = torch.full_like(num_valid_units, counts.unit_num_tokens.shape[0])
            num_units = num_valid_units if self.sequence_count == "valid" else num_all
            inputs = replace(inputs, num_units=num_units, num_valid_units=num_valid_units)
        if unit_of_seq is None:
            return inputs
        if counts.unit_num_tokens is None or counts.unit_num_seqs is None:
            raise ValueError(
                f"loss_agg_mode={self.loss_agg_mode!r} needs the counts of units: "
                "GlobalCounts(..., unit_num_tokens=[U], unit_num_seqs=[U])."
            )
        return replace(
            inputs,
            unit_num_tokens=counts.unit_num_tokens[unit_of_seq].double(),
            unit_num_seqs=counts.unit_num_seqs[unit_of_seq].double(),
        )

    @property
    def needs_units(self) -> bool:
        """Whether sequences must carry `unit_ids`."""
        return get_mode(self.loss_agg_mode).needs_units

    def checksum(self, counts: GlobalCounts) -> Tensor | None:
        """The sum of all weights of the global batch, float64, shape []; None: not told by them."""
        checksum = get_mode(self.loss_agg_mode).checksum
        return None if checksum is None else checksum(self.inputs(counts, counts.num_tokens.device))

    def divisor(self, counts: GlobalCounts) -> Tensor | None:
        """The count that every weight of the mode is divided by, float64 []; None: there is none.

        Weights made with counts of 1 (`undivided_counts`) are the mode's weights times it.
        """
        divisor = get_mode(self.loss_agg_mode).divisor
        return None if divisor is None else divisor(self.inputs(counts, counts.num_tokens.device))


def undivided_counts() -> GlobalCounts:
    """Counts of 1, with which a mode gives its weights before the division by `divisor`."""
    return GlobalCounts(1, 1, 1)  # type: ignore[arg-type]
