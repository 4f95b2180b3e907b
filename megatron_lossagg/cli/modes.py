"""`megatron-lossagg modes`: the aggregation modes and the presets, as lists for any width."""

from __future__ import annotations

import shutil
import textwrap

import typer

from megatron_lossagg.config.presets import PRESETS, REFUSED
from megatron_lossagg.modes.length_power import MAX_EXPONENT, PREFIX, formula_of
from megatron_lossagg.modes.registry import get_mode, mode_names, registered_by, registered_names
from megatron_lossagg.modes.table import AggregationMode, Formula

_INDENT = "    "
_SYMBOLS = (
    "T: valid tokens of the global batch. B: its sequences with a valid token (sequence_count: "
    "valid) or all real rows (nominal); B_valid: the former. n_s: valid tokens of the sequence. L: "
    "loss_scale_factor. U: units (rollouts, prompts), counted as B is; T_u, B_u: tokens and "
    "sequences of the sequence's unit."
)


def modes() -> None:
    """List the aggregation modes, also registered ones, with a token's weight, and the presets."""
    own = registered_names()  # imports the modules that register modes
    lines = [*_wrapped("J = sum over the global batch of w * l, with w by loss_agg_mode:"), ""]
    for name in mode_names():
        notes = [f"registered by {registered_by(name)}"] if name in own else []
        lines += _mode(get_mode(name), notes)
    family = formula_of("A")
    lines += _formula(f"{PREFIX}A", family, [f"A: a number from 0 to {MAX_EXPONENT:g}"])
    lines += ["", *_wrapped(_SYMBOLS), ""]
    lines += _wrapped("Presets: LossAggConfig.preset(name, ...), or the key `preset` in YAML:")
    for name, preset in PRESETS.items():
        lines += ["", name, *_wrapped(f"J = {preset.formula}", _INDENT)]
        lines += _wrapped(f"reproduces: {preset.reproduces}", _INDENT)
        lines += _wrapped(f"add: {preset.caller_adds}", _INDENT)
    for name, reason in REFUSED.items():
        lines += ["", *_wrapped(f"{name}: refused. {reason}")]
    typer.echo("\n".join(lines))


def _mode(mode: AggregationMode, notes: list[str]) -> list[str]:
    notes = [*notes, "needs unit_ids"] if mode.needs_units else notes
    if mode.seq_mean_formula is None:
        return _formula(mode.name, mode.formula, notes)
    return [
        *_formula(mode.name, mode.formula, [*notes, "norm_semantics: sum"]),
        *_formula(mode.name, mode.seq_mean_formula, [*notes, "norm_semantics: seq-mean"]),
    ]


def _formula(name: str, formula: Formula, notes: list[str]) -> list[str]:
    total = formula.sum_of_weights or "told by no count, so compared with the plan"
    lines = [*notes, f"w = {formula.weight:<19}  sum of w = {total}"]
    if formula.reads:
        lines.append(f"reads {', '.join(formula.reads)}")
    return [name, *(part for line in lines for part in _wrapped(line, _INDENT))]


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of the terminal's width, broken at blanks alone: names have hyphens."""
    return textwrap.wrap(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
