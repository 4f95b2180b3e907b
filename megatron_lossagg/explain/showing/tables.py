"""The numbers as tables of text, for the terminal and for the page."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.mode_weights import ModeWeights
from megatron_lossagg.explain.showing.sentences import number, singular


@dataclass(frozen=True)
class TextTable:
    """A table whose first column is text and whose others are numbers.

    Attributes:
        title: what it shows, with the unit.
        headings: one per column; a line break is kept.
        sections: rows that belong together, each a list of cells; a line break is kept.
        reference: a row to compare the others with, or None.
    """

    title: str
    headings: list[str]
    sections: list[list[list[str]]]
    reference: list[str] | None = None

    def with_columns(self, columns: list[int]) -> TextTable:
        """The same table with these of its columns."""

        def chosen(cells: list[str]) -> list[str]:
            return [cells[column] for column in columns]

        return TextTable(
            self.title,
            chosen(self.headings),
            [[chosen(row) for row in section] for section in self.sections],
            None if self.reference is None else chosen(self.reference),
        )


def tables(explanation: Explanation) -> list[TextTable]:
    """All that apply to the data. Modes that share the weight out alike are one section."""
    result = [_weights(explanation), _by_length(explanation)]
    if explanation.rewards:
        result.append(_by_reward(explanation))
    if explanation.has_push:
        result.append(_net_push(explanation))
    return result


def _weights(explanation: Explanation) -> TextTable:
    one = singular(explanation)

    def row(mode: ModeWeights) -> list[str]:
        weights = [mode.total]
        for weight in (explanation.token_weight, explanation.sequence_weight):
            weights += [weight(mode, explanation.short), weight(mode, explanation.long)]
        return [f"{mode.label}\n  w = {mode.formula}", *map(_scientific, weights)]

    return TextTable(
        f"Weight of one {one} and of one response, in the shortest and the longest 10%",
        [
            "loss_agg_mode",
            "sum\nof w",
            f"{one},\nshort",
            f"{one},\nlong",
            "response,\nshort",
            "response,\nlong",
        ],
        [[row(mode) for mode in family] for family in explanation.families],
    )


def _by_length(explanation: Explanation) -> TextTable:
    buckets = [*explanation.lengths, explanation.long]
    labels = [_broken(bucket.label) for bucket in explanation.lengths]

    def row(mode: ModeWeights) -> list[str]:
        return [mode.label, *(f"{explanation.share(mode, bucket):.1%}" for bucket in buckets)]

    reference = [f"{explanation.share_of_responses(bucket):.1%}" for bucket in buckets]
    return TextTable(
        f"Share of the whole weight by length of the response in {explanation.rollouts.unit}",
        ["loss_agg_mode", *labels, "longest\n10%"],
        [[row(mode) for mode in family] for family in explanation.families],
        ["(share of responses)", *reference],
    )


def _by_reward(explanation: Explanation) -> TextTable:
    pair = explanation.long_low_and_short_high()
    headings = ["loss_agg_mode", *(_broken(bucket.label) for bucket in explanation.rewards)]
    if pair is not None:
        headings.append(f"w of a {singular(explanation)},\nlong low /\nshort high")

    def row(mode: ModeWeights) -> list[str]:
        cells = [mode.label]
        cells += [f"{explanation.share(mode, bucket):.1%}" for bucket in explanation.rewards]
        if pair is not None:
            low, high = (explanation.token_weight(mode, bucket) for bucket in pair)
            cells.append(f"{low / high:.2f}")
        return cells

    reference = [f"{explanation.share_of_responses(bucket):.1%}" for bucket in explanation.rewards]
    blank = [""] * (len(headings) - 1 - len(reference))
    return TextTable(
        "Share of the whole weight by reward",
        headings,
        [[row(mode) for mode in family] for family in explanation.families],
        ["(share of responses)", *reference, *blank],
    )


def _net_push(explanation: Explanation) -> TextTable:
    def row(mode: ModeWeights) -> list[str]:
        push = explanation.push(mode)
        assert push is not None  # advantages are there for all modes or for none
        nets = [explanation.net_push(mode, bucket) for bucket in explanation.lengths]
        return [mode.label, *(f"{net:+.1%}" for net in nets), f"{push.down_share:.1%}"]

    return TextTable(
        f"Net push (above 0: made likelier) by length in {explanation.rollouts.unit}, and how much "
        "of the push goes down",
        ["loss_agg_mode", *(_broken(bucket.label) for bucket in explanation.lengths), "down"],
        [[row(mode) for mode in family] for family in explanation.families],
    )


def _broken(label: str) -> str:
    """`2-169`, `wrong (reward 0)`, `reward 0.2 to 0.5`, broken so that columns are narrow."""
    label = label.replace("\N{EN DASH}", "\N{EN DASH}\n")
    if " (" in label:
        return label.replace(" (", "\n(")
    return label.replace("reward ", "reward\n").replace(" to ", " to\n")


def _scientific(value: float) -> str:
    """Three digits, or two and an exponent: at most 7 characters."""
    if 0.01 <= value < 1e5:
        return number(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
