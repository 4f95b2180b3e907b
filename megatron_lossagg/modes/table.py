"""What a mode is, and the built-in ones with their formulas; symbols: the package's docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg.modes.options import OPTION_NAMES


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
class Formula:
    """What a mode computes, in symbols: the one text that commands and documents show.

    Attributes:
        weight: of a valid token, such as "1 / (B * n_s)".
        sum_of_weights: over the global batch, such as "B_valid / B"; None: not told by counts.
        reads: the fields of `ModeOptions` that change it.
    """

    weight: str
    sum_of_weights: str | None = None
    reads: tuple[str, ...] = ()


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
        formula: the same in symbols, with `norm_semantics="sum"` where the mode reads it.
        seq_mean_formula: with `norm_semantics="seq-mean"`, in a mode where that makes another one.
        needs_loss_scale_factor: whether there is no weight without L.
    """

    name: str
    sequence_factor: Callable[[Tensor, ModeInputs], Tensor]
    checksum: Callable[[ModeInputs], Tensor] | None = None
    needs_units: bool = False
    divisor: Callable[[ModeInputs], Tensor] | None = None
    formula: Formula = Formula("no formula given", None, OPTION_NAMES)
    seq_mean_formula: Formula | None = None
    needs_loss_scale_factor: bool = False

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """One, or those of both `norm_semantics`."""
        return (
            (self.formula,)
            if self.seq_mean_formula is None
            else (self.formula, self.seq_mean_formula)
        )

    def reads(self, option: str) -> bool:
        """Whether the weights can depend on that field of `ModeOptions`."""
        return any(option in formula.reads for formula in self.formulas)


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


BUILT_IN = {
    mode.name: mode
    for mode in (
        AggregationMode(
            "token-mean",
            lambda n_s, c: reciprocal_or_zero(c.num_tokens),
            lambda c: (c.num_tokens > 0).to(torch.float64),
            divisor=lambda c: c.num_tokens,
            formula=Formula("1 / T", "1"),
        ),
        AggregationMode(
            "token-sum",
            lambda n_s, c: torch.ones_like(c.num_tokens),
            lambda c: c.num_tokens,
            divisor=lambda c: torch.ones_like(c.num_tokens),
            formula=Formula("1", "T"),
        ),
        AggregationMode(
            "seq-mean-token-sum",
            lambda n_s, c: reciprocal_or_zero(c.num_seqs),
            lambda c: c.num_tokens * reciprocal_or_zero(c.num_seqs),
            divisor=lambda c: c.num_seqs,
            formula=Formula("1 / B", "T / B", ("sequence_count",)),
        ),
        AggregationMode(
            "seq-mean-token-mean",
            lambda n_s, c: reciprocal_or_zero(c.num_seqs) * reciprocal_or_zero(n_s),
            lambda c: c.num_valid_seqs * reciprocal_or_zero(c.num_seqs),
            divisor=lambda c: c.num_seqs,
            formula=Formula("1 / (B * n_s)", "B_valid / B", ("sequence_count",)),
        ),
        AggregationMode(
            "seq-mean-token-sum-norm",
            lambda n_s, c: _norm_divisor_reciprocal(c),
            lambda c: c.num_tokens * _norm_divisor_reciprocal(c),
            divisor=lambda c: (
                torch.ones_like(c.num_tokens) if c.norm_semantics == "sum" else c.num_seqs
            ),
            formula=Formula("1 / L", "T / L", ("loss_scale_factor", "norm_semantics")),
            seq_mean_formula=Formula(
                "1 / (B * L)",
                "T / (B * L)",
                ("loss_scale_factor", "norm_semantics", "sequence_count"),
            ),
            needs_loss_scale_factor=True,
        ),
        AggregationMode(
            "unit-mean-token-sum",
            lambda n_s, c: _number_of_units_reciprocal(c),
            lambda c: c.num_tokens * _number_of_units_reciprocal(c),
            needs_units=True,
            formula=Formula("1 / U", "T / U", ("sequence_count",)),
        ),
        AggregationMode(
            "unit-mean-token-mean",
            lambda n_s, c: _unit_mean(c, c.unit_num_tokens),
            _valid_share_of_units,
            needs_units=True,
            formula=Formula("1 / (U * T_u)", "U_valid / U", ("sequence_count",)),
        ),
        AggregationMode(
            "unit-mean-seq-mean-token-mean",
            lambda n_s, c: _unit_mean(c, c.unit_num_seqs) * reciprocal_or_zero(n_s),
            _valid_share_of_units,
            needs_units=True,
            formula=Formula("1 / (U * B_u * n_s)", "U_valid / U", ("sequence_count",)),
        ),
    )
}
