"""The options of a mode, declared once: whoever takes them inherits `ModeOptions`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from megatron_lossagg.words import Word, plain_values


class NormSemantics(Word):
    """What `seq-mean-token-sum-norm` divides the masked sum by."""

    SUM = "sum"
    """L: verl up to 0.7."""

    SEQ_MEAN = "seq-mean"
    """B * L: verl since 2026-02, and TRL's dr_grpo."""


class SequenceCount(Word):
    """Which sequences are B, and which units are U."""

    VALID = "valid"
    """Those with a valid token."""

    NOMINAL = "nominal"
    """Every row that `sample_mask` does not mark as padding, and every one of the `num_units`."""


NORM_SEMANTICS = tuple(NormSemantics)
SEQUENCE_COUNTS = tuple(SequenceCount)


@dataclass(frozen=True, kw_only=True)
class ModeOptions:
    """The options of a mode; checked when built. None: not given, so the default holds."""

    loss_scale_factor: float | None = None
    """L, a number > 0; `seq-mean-token-sum-norm` needs it, and has no default."""

    norm_semantics: str | None = None
    """A `NormSemantics` or its text: "sum" (1/L, the default) or "seq-mean" (1/(B*L))."""

    sequence_count: str | None = None
    """A `SequenceCount` or its text: B and U count "valid" sequences and units (the default), or
    "nominal" ones."""

    def __post_init__(self) -> None:
        if self.norm_semantics is not None:
            check_norm_semantics(self.norm_semantics)
            object.__setattr__(self, "norm_semantics", NormSemantics(self.norm_semantics))
        if self.sequence_count is not None:
            check_sequence_count(self.sequence_count)
            object.__setattr__(self, "sequence_count", SequenceCount(self.sequence_count))
        if self.loss_scale_factor is not None:
            check_loss_scale_factor(self.loss_scale_factor)
            # 4, 4.0 and numpy's 4 are one configuration: ranks compare it by its text.
            object.__setattr__(self, "loss_scale_factor", float(self.loss_scale_factor))

    @property
    def mode_options(self) -> dict[str, Any]:
        """The three options as plain values, by name: for files, and for whoever takes them too."""
        return plain_values({name: getattr(self, name) for name in OPTION_NAMES})

    @property
    def not_default(self) -> dict[str, Any]:
        """Those that somebody gave and that are not the defaults, as plain values by name."""
        defaults = (None, NormSemantics.SUM, SequenceCount.VALID)
        return {k: v for k, v in self.mode_options.items() if v not in defaults}


OPTION_NAMES = tuple(field.name for field in fields(ModeOptions))


def check_norm_semantics(norm_semantics: str) -> None:
    """Raise ValueError unless `norm_semantics` is one of `NORM_SEMANTICS`."""
    if norm_semantics not in NORM_SEMANTICS:
        raise ValueError(
            f"norm_semantics={norm_semantics!r} does not exist; expected 'sum' (masked sum / L, "
            "verl up to 0.7) or 'seq-mean' (masked sum / (B * L), verl since 2026-02 and TRL "
            "dr_grpo)."
        )


def check_sequence_count(sequence_count: str) -> None:
    """Raise ValueError unless `sequence_count` is one of `SEQUENCE_COUNTS`."""
    if sequence_count not in SEQUENCE_COUNTS:
        raise ValueError(
            f"sequence_count={sequence_count!r} does not exist; expected 'valid' or 'nominal'."
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
