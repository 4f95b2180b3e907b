"""What must be equal on all ranks of a step, option by option."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lossagg.config.options import LossAggOptions
from megatron_lossagg.modes.spec import ModeSpec
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.schedule.contract import ScheduleContract

_OPTIONS = ("cp_gradient", "weight_dtype", "denominators", "masks_are_cp_sliced", "report_counts")


def options_identity(options: LossAggOptions, objective: Objective) -> dict[str, str]:
    """Of an aggregator: the options that decide weights, reports and collectives, as text."""
    found = {name: repr(getattr(options, name)) for name in _OPTIONS}
    if not objective.reported_terms:
        [only] = objective.terms
        found |= _mode_identity(only.spec, "")
    else:
        found["terms"] = ", ".join(term.name for term in objective.terms)
        for term in objective.terms:
            where = f"term {term.name!r}: "
            found |= _mode_identity(term.spec, where)
            found[f"{where}mask_key"] = repr(term.mask_key)
    for metric in objective.metrics:
        found[f"metric {metric.name!r}"] = repr(metric.normaliser)
    return found


def _mode_identity(spec: ModeSpec, where: str) -> dict[str, str]:
    options = {"loss_agg_mode": spec.loss_agg_mode, **spec.mode_options}
    return {f"{where}{name}": repr(value) for name, value in options.items()}


def step_identity(
    contract: ScheduleContract, objective: Objective, coefficients: Sequence[float]
) -> dict[str, str]:
    """Of a step: its regime and its coefficients, as text."""
    found = {"the regime": f"{contract.regime}"}
    # Neither a loss without a name nor a rank that only hears a report has any.
    for term, coefficient in zip(objective.reported_terms, coefficients, strict=False):
        found[f"the coefficient of term {term.name!r}"] = repr(coefficient)
    return found
