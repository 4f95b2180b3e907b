"""`megatron-lossagg modes`: the aggregation modes, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_ROWS = (
    ("token-mean", "", "1 / T", "1"),
    ("token-sum", "", "1", "T"),
    ("seq-mean-token-sum", "", "1 / B", "T / B"),
    ("seq-mean-token-mean", "", "1 / (B n_s)", "B_valid / B"),
    ("seq-mean-token-sum-norm", "norm_semantics: sum", "1 / L", "T / L"),
    ("seq-mean-token-sum-norm", "norm_semantics: seq-mean", "1 / (B L)", "T / (B L)"),
    ("unit-mean-token-sum", "needs unit_ids", "1 / U", "T / U"),
    ("unit-mean-token-mean", "needs unit_ids", "1 / (U T_u)", "1"),
    ("unit-mean-seq-mean-token-mean", "needs unit_ids", "1 / (U B_u n_s)", "1"),
)


def modes() -> None:
    """List the aggregation modes with the weight each gives a token."""
    table = Table(title="J = sum over the global batch of w * l")
    for heading in ("loss_agg_mode", "option", "w of a valid token", "sum of all w"):
        table.add_column(heading, overflow="fold")
    for row in _ROWS:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(
        "T: valid tokens of the global batch. B: its sequences with a valid token (sequence_count: "
        "valid) or all real rows (nominal). n_s: valid tokens of the sequence. L: "
        "loss_scale_factor. U: units (rollouts, prompts) with a valid token; T_u, B_u: tokens and "
        "sequences of the sequence's unit."
    )
