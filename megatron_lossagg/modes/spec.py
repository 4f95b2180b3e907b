"""`ModeSpec`: a mode with the options that fix its weights, checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.modes.options import ModeOptions, NormSemantics, SequenceCount
from megatron_lossagg.modes.registry import get_mode
from megatron_lossagg.modes.table import AggregationMode, Formula, ModeInputs


@dataclass(frozen=True)
class ModeSpec(ModeOptions):
    """A mode with the options that fix its weights, checked when built; only L may be None.

    Specs are equal, hash and print by the mode's name and the options, and are pickled so: a mode
    may hold lambdas.

    Attributes:
        loss_agg_mode: name of the mode.
        mode: the mode itself.
    """

    loss_agg_mode: str
    mode: AggregationMode = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", get_mode(self.loss_agg_mode))
        super().__post_init__()
        # What a mode does not read is no part of it: terms that differ in it alone share weights.
        # `sequence_count` is, as metrics and reports read it too.
        if not self.mode.reads("loss_scale_factor"):
            object.__setattr__(self, "loss_scale_factor", None)
        if self.norm_semantics is None or not self.mode.reads("norm_semantics"):
            object.__setattr__(self, "norm_semantics", NormSemantics.SUM)
        if self.sequence_count is None:
            object.__setattr__(self, "sequence_count", SequenceCount.VALID)
        if self.loss_scale_factor is None and self.mode.needs_loss_scale_factor:
            raise ValueError(
                f"loss_agg_mode={self.loss_agg_mode!r} needs loss_scale_factor, a number > 0: "
                "the mask of a Megatron microbatch includes the prompt and padding, so its width "
                "is no usable default. Pass the maximum response length."
            )

    @classmethod
    def of(cls, loss_agg_mode: str, options: ModeOptions) -> ModeSpec:
        """The mode of that name with options that somebody was given."""
        return cls(loss_agg_mode, **options.mode_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _spec_of, (self.loss_agg_mode, self.mode_options)

    def inputs(
        self, counts: GlobalCounts, device: torch.device, unit_of_seq: Tensor | None = None
    ) -> ModeInputs:
        """The counts as float64 tensors on `device`, with B chosen by `sequence_count`.

        Args:
            counts: of the global batch.
            device: of the result.
            unit_of_seq: int64 [n], the unit of each sequence, in modes with units.

        Returns:
            What the mode's functions take.

        Raises:
            ValueError: a mode with units, and counts without them.
        """
        counts = counts.to(device)
        num_seqs = counts.num_valid_seqs if self.sequence_count == "valid" else counts.num_seqs
        inputs = ModeInputs(
            num_tokens=counts.num_tokens.double(),
            num_seqs=num_seqs.double(),
            num_valid_seqs=counts.num_valid_seqs.double(),
            loss_scale_factor=self.loss_scale_factor,
            norm_semantics=NormSemantics(self.norm_semantics),
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
        return self.mode.needs_units

    @property
    def formula(self) -> Formula:
        """What it computes, in symbols."""
        seq_mean = self.mode.seq_mean_formula
        is_seq_mean = self.norm_semantics == NormSemantics.SEQ_MEAN
        return seq_mean if seq_mean is not None and is_seq_mean else self.mode.formula

    def checksum(self, counts: GlobalCounts) -> Tensor | None:
        """The sum of all weights of the global batch, float64, shape []; None: not told by them."""
        checksum = self.mode.checksum
        return None if checksum is None else checksum(self.inputs(counts, counts.num_tokens.device))

    def divisor(self, counts: GlobalCounts) -> Tensor | None:
        """The count that every weight of the mode is divided by, float64 []; None: there is none.

        Weights made with counts of 1 (`undivided_counts`) are the mode's weights times it.
        """
        divisor = self.mode.divisor
        return None if divisor is None else divisor(self.inputs(counts, counts.num_tokens.device))


def undivided_counts() -> GlobalCounts:
    """Counts of 1, with which a mode gives its weights before the division by `divisor`."""
    return GlobalCounts(1, 1, 1)  # type: ignore[arg-type]


def _spec_of(loss_agg_mode: str, options: dict[str, Any]) -> ModeSpec:
    """How a pickled spec is made again."""
    return ModeSpec(loss_agg_mode, **options)
