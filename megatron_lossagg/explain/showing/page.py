"""An explanation as one HTML file that loads nothing else."""

from __future__ import annotations

import base64
from html import escape

from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.showing.sentences import headline, notes, reading_help, singular
from megatron_lossagg.explain.showing.tables import TextTable, tables
from megatron_lossagg.version import __version__

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
.notes, footer { color: #5a5a5a; font-size: 0.9rem; }
img { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.6rem 0; }
th, td { padding: 0.2rem 0.8rem; text-align: right; white-space: pre-line; vertical-align: top; }
th:first-child { text-align: left; }
td { white-space: nowrap; }
thead th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; }
tbody { border-bottom: 1px solid #c8c8c8; }
tbody th { font-weight: 400; font-family: ui-monospace, monospace; font-size: 0.9rem; }
tfoot { color: #5a5a5a; }
tfoot th { font-weight: 400; }
"""


def page(explanation: Explanation, picture: bytes | None) -> str:
    """HTML with the sentences, the picture (a PNG, inside the file) and the tables."""
    title = f"Who gets the weight? {explanation.source}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(headline(explanation))}</p>",
        _list(notes(explanation), "notes"),
        "<h2>In words</h2>",
        _list(reading_help(explanation), "words"),
    ]
    if picture is not None:
        data = base64.b64encode(picture).decode("ascii")
        alt = (
            f"Charts of the weight of one {singular(explanation)} by length and of the shares of "
            "the weight by length and reward; the tables below hold the same numbers."
        )
        parts += [
            "<h2>The picture</h2>",
            f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">',
        ]
    parts.append("<h2>The numbers</h2>")
    parts += [_table(table) for table in tables(explanation)]
    parts += ["<h2>How to read them</h2>", _list(_symbols(explanation), "symbols")]
    parts.append(f"<footer>megatron-lossagg explain, version {escape(__version__)}</footer>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _symbols(explanation: Explanation) -> list[str]:
    one = singular(explanation)
    lines = [
        f"Every mode is a weight per {one}: J = sum over the global batch of w times the loss of "
        f"that {one}. The share of some responses is their part of the sum of all w.",
        f"T: {explanation.rollouts.unit} of the global batch. B: its responses with at least one. "
        "n_s: those of the response. L: loss_scale_factor.",
    ]
    if explanation.rollouts.group_of_seq is not None:
        lines.append(
            f"U: groups with at least one. T_u, B_u: {explanation.rollouts.unit} and responses of "
            "the response's group."
        )
    if explanation.has_push:
        lines.append(
            "Push: w times the advantage A = reward - mean reward of the group, which is how "
            f"strongly a {one}'s log-probability is raised (A above 0) or lowered on policy and "
            "without clipping. Push down is the part of the sum of w |A| with A below 0; net push "
            "is the sum of w A over some responses as a part of that sum over all."
        )
    return lines


def _list(lines: list[str], css_class: str) -> str:
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{css_class}">\n{items}\n</ul>'


def _table(table: TextTable) -> str:
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    bodies = "\n".join(
        "<tbody>\n" + "\n".join(map(_row, section)) + "\n</tbody>" for section in table.sections
    )
    foot = "" if table.reference is None else f"<tfoot>\n{_row(table.reference)}\n</tfoot>\n"
    return (
        f'<div class="scroll"><table>\n<caption>{escape(table.title)}</caption>\n'
        f"<thead><tr>{headings}</tr></thead>\n{bodies}\n{foot}</table></div>"
    )


def _row(cells: list[str]) -> str:
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f'<tr><th scope="row">{escape(cells[0])}</th>{numbers}</tr>'
