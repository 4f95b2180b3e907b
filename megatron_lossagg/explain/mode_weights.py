"""The weights of one mode over the rollouts, by the library's own formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_lossagg.explain.rollouts import Rollouts
from megatron_lossagg.modes.registry import get_mode, mode_names, registered_names
from megatron_lossagg.modes.spec import ModeSpec


@dataclass(frozen=True)
class ModeWeights:
    """A mode's weights, one per sequence: all valid tokens of a sequence weigh the same.

    Attributes:
        label: the mode, with `/seq-mean` for the norm mode with `norm_semantics="seq-mean"`.
        formula: the weight of a token in symbols.
        of_token: w of a valid token of each sequence, float64 [n].
        of_sequence: n_s * w, float64 [n].
    """

    label: str
    formula: str
    of_token: Tensor
    of_sequence: Tensor

    @property
    def total(self) -> float:
        """The sum of w over the global batch: the mode's scale."""
        return float(self.of_sequence.sum())

    @cached_property
    def shares(self) -> Tensor:
        """The part of the whole weight that each sequence has, float64 [n]; they sum to 1."""
        return self.of_sequence / self.of_sequence.sum()


def mode_labels(has_groups: bool) -> tuple[str, ...]:
    """The modes that can be shown, also registered ones; those with units need groups."""
    registered_names()  # imports the modules that register modes
    labels: list[str] = []
    for name in mode_names():
        mode = get_mode(name)
        if has_groups or not mode.needs_units:
            has_two = mode.seq_mean_formula is not None
            labels += [name, f"{name}/seq-mean"] if has_two else [name]
    return tuple(labels)


def weigh(rollouts: Rollouts, labels: Sequence[str], loss_scale_factor: float) -> list[ModeWeights]:
    """The weights of every mode in `labels`, the rollouts being one global batch.

    Args:
        rollouts: of the batch.
        labels: of the modes, see `mode_labels`.
        loss_scale_factor: L, for the modes that divide by it.

    Returns:
        One entry per label.

    Raises:
        ValueError: an unknown label, or a mode with units for rollouts without groups.
    """
    device = rollouts.num_tokens.device
    n_s = rollouts.num_tokens.double()
    counts = rollouts.counts
    result = []
    for label in labels:
        _check_label(label, rollouts.group_of_seq is not None)
        name, _, semantics = label.partition("/")
        spec = ModeSpec(name, loss_scale_factor=loss_scale_factor, norm_semantics=semantics or None)
        units = rollouts.group_of_seq if spec.needs_units else None
        factor = spec.mode.sequence_factor(n_s, spec.inputs(counts, device, units))
        of_token = torch.where(rollouts.num_tokens > 0, factor, torch.zeros_like(n_s))
        of_sequence = of_token * n_s
        if not 0 < float(of_sequence.sum()) < float("inf"):
            raise ValueError(
                f"the weights of {label} sum to {float(of_sequence.sum())}, which cannot be shared "
                "out; expected a finite number above 0"
            )
        result.append(ModeWeights(label, spec.formula.weight, of_token, of_sequence))
    return result


def _check_label(label: str, has_groups: bool) -> None:
    possible = mode_labels(has_groups)
    if label in possible:
        return
    if label in mode_labels(True):
        raise ValueError(
            f"{label} needs to know which responses belong together, and the file has no group "
            "field; name it with --group-field, or leave the mode out"
        )
    raise ValueError(f"unknown mode {label!r}; expected some of {', '.join(possible)}")
