"""`megatron-lossagg modes`: the aggregation modes and the presets, as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_lossagg.config.presets import PRESETS, REFUSED
from megatron_lossagg.modes import get_mode, registered_by, registered_names

_ROWS = (
    ("token-mean", "", "1 / T", "1"),
    ("token-sum", "", "1", "T"),
    ("seq-mean-token-sum", "", "1 / B", "T / B"),
    ("seq-mean-token-mean", "", "1 / (B n_s)", "B_valid / B"),
    ("seq-mean-token-sum-norm", "norm_semantics: sum", "1 / L", "T / L"),
    ("seq-mean-token-sum-norm", "norm_semantics: seq-mean", "1 / (B L)", "T / (B L)"),
    ("unit-mean-token-sum", "needs unit_ids", "1 / U", "T / U"),
    ("unit-mean-token-mean", "needs unit_ids", "1 / (U T_u)", "U_valid / U"),
    ("unit-mean-seq-mean-token-mean", "needs unit_ids", "1 / (U B_u n_s)", "U_valid / U"),
    ("length-power-A", "A from 0 to 4", "n_s^-A / B", "compared with the plan"),
)


def modes() -> None:
    """List the aggregation modes, also registered ones, with a token's weight, and the presets."""
    table = Table(title="J = sum over the global batch of w * l")
    for heading in ("loss_agg_mode", "option", "w of a valid token", "sum of all w"):
        table.add_column(heading, overflow="fold")
    for row in _ROWS:
        table.add_row(*row)
    for name in registered_names():
        mode = get_mode(name)
        needs = "needs unit_ids, " if mode.needs_units else ""
        total = "compared with the plan" if mode.checksum is None else "by its own checksum"
        table.add_row(name, f"{needs}registered by {registered_by(name)}", "its own", total)
    console = Console()
    console.print(table)
    console.print(
        "T: valid tokens of the global batch. B: its sequences with a valid token (sequence_count: "
        "valid) or all real rows (nominal). n_s: valid tokens of the sequence. L: "
        "loss_scale_factor. U: units (rollouts, prompts), counted as B is; T_u, B_u: tokens and "
        "sequences of the sequence's unit.\n"
    )
    console.print(_presets())
    for name, reason in REFUSED.items():
        console.print(f"{name}: refused. {reason}")


def _presets() -> Table:
    table = Table(title="Presets: LossAggConfig.preset(name, ...), or the key `preset` in YAML")
    for heading in ("preset", "J", "reproduces", "add"):
        table.add_column(heading, overflow="fold")
    for name, preset in PRESETS.items():
        table.add_row(name, preset.formula, preset.reproduces, preset.caller_adds, end_section=True)
    return table
