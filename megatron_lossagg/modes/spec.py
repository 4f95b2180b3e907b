"""`ModeSpec`: a mode with the options that fix its weights, checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.modes.registry import get_mode
from megatron_lossagg.modes.table import ModeInputs

SEQUENCE_COUNTS = ("valid", "nominal")
NORM_SEMANTICS = ("sum", "seq-mean")


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
