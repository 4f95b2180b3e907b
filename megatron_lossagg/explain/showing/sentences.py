"""What the numbers say, in sentences."""

from __future__ import annotations

import math
import re

from megatron_lossagg.explain.explanation import Explanation

_SINGULAR = {"tokens": "token", "bytes": "byte", "words": "word"}
# Closer than this, two numbers are called the same.
_SAME = 0.005


def headline(explanation: Explanation) -> str:
    """One line: what was read."""
    rollouts = explanation.rollouts
    unit = rollouts.unit
    parts = [f"{len(rollouts.num_tokens):,} responses"]
    if rollouts.group_of_seq is not None:
        parts[0] += f" in {rollouts.num_groups:,} groups"
    lengths = rollouts.num_tokens
    parts.append(
        f"{int(lengths.sum()):,} {unit} (per response {int(lengths.min()):,} to "
        f"{int(lengths.max()):,}, {lengths.double().mean():,.0f} on average)"
    )
    if rollouts.rewards is not None:
        parts.append(f"mean reward {rollouts.rewards.mean():.3f}")
    return "; ".join(parts)


def notes(explanation: Explanation) -> list[str]:
    """Where the numbers come from, and what was assumed."""
    rollouts = explanation.rollouts
    origins = [f"{what} from {origin}" for what, origin in rollouts.fields.items()]
    lines = [f"Read: {', '.join(origins)}. The whole file counts as one global batch."]
    if rollouts.unit != "tokens":
        lines.append(
            f"The file says nothing about tokens, so a {singular(explanation)} stands for one: "
            "name a field with token counts, ids or a mask for exact numbers."
        )
    num_empty = len(rollouts.num_tokens) - explanation.num_valid_seqs
    if num_empty:
        lines.append(
            f"Responses without a {singular(explanation)} that counts: {num_empty:,}. B is the "
            f"number of the others, {explanation.num_valid_seqs:,}."
        )
    if any(re.search(r"\bL\b", mode.formula) for mode in explanation.modes):
        chosen = ", the longest response" if explanation.is_default_factor else ""
        lines.append(f"L (loss_scale_factor) is {explanation.loss_scale_factor:,g}{chosen}.")
    return lines


def singular(explanation: Explanation) -> str:
    """The word for one unit of length."""
    return _SINGULAR[explanation.rollouts.unit]


def reading_help(explanation: Explanation) -> list[str]:
    """Sentences on length, on reward and on scale, computed from the data."""
    return [
        *_on_length(explanation),
        *_on_long_low(explanation),
        *_on_reward(explanation),
        *_on_push(explanation),
        *_on_scale(explanation),
    ]


def _on_length(explanation: Explanation) -> list[str]:
    unit, one = explanation.rollouts.unit, singular(explanation)
    short, long = explanation.short, explanation.long
    sentences = [
        f"The shortest 10% of the responses have {explanation.mean_length(short):,.0f} {unit} on "
        f"average, the longest 10% {explanation.mean_length(long):,.0f}."
    ]
    for family in explanation.families:
        mode = family[0]
        ratio = explanation.token_weight(mode, long) / explanation.token_weight(mode, short)
        sentences.append(
            f"{mode.label}: a {one} of the longest weighs {compared(ratio)} a {one} of the "
            f"shortest; the longest 10% hold {explanation.share(mode, long):.0%} of the weight."
        )
    return sentences


def _on_long_low(explanation: Explanation) -> list[str]:
    pair = explanation.long_low_and_short_high()
    if pair is None:
        return []
    one = singular(explanation)
    low, high = explanation.rewards[0].label, explanation.rewards[-1].label
    ratios = {
        family[0].label: explanation.token_weight(family[0], pair[0])
        / explanation.token_weight(family[0], pair[1])
        for family in explanation.families
    }
    first = max(ratios, key=lambda label: abs(math.log(ratios[label])))
    sentence = (
        f"In {first} a {one} of a long {_response_with(low)} weighs {compared(ratios.pop(first))} "
        f"a {one} of a short {_response_with(high)}"
    )
    rest = [f"in {label} {compared(r).removesuffix(' as')}" for label, r in ratios.items()]
    rest = [part.removesuffix(" of") for part in rest]
    return [f"{sentence}{'; ' if rest else ''}{_listed(rest)}."]


def _on_reward(explanation: Explanation) -> list[str]:
    if len(explanation.rewards) < 2:
        return []
    bucket = explanation.rewards[0]
    parts = [
        f"{explanation.share(family[0], bucket):.1%} in {family[0].label}"
        for family in explanation.families
    ]
    are = f"are {bucket.label}" if "(" in bucket.label else f"have {bucket.label}"
    return [
        f"Of all responses {explanation.share_of_responses(bucket):.1%} {are}; their "
        f"part of the weight is {_listed(parts)}."
    ]


def _on_push(explanation: Explanation) -> list[str]:
    parts = []
    for family in explanation.families:
        push = explanation.push(family[0])
        if push is not None:
            parts.append(f"{push.down_share:.1%} in {family[0].label}")
    if not parts:
        return []
    return [
        "With the advantage reward - mean reward of the group, on policy, the part of the push "
        f"that goes down (on responses below their group's mean) is {_listed(parts)}."
    ]


def _on_scale(explanation: Explanation) -> list[str]:
    sentences = []
    for family in explanation.families:
        labels = _listed([mode.label for mode in family])
        totals = [mode.total for mode in family]
        if len(family) > 1 and max(totals) < 1.000001 * min(totals):
            sentences.append(f"In this file {labels} give the same weights.")
        elif len(family) > 1:
            sums = _listed([number(total) for total in totals])
            sentences.append(
                f"{labels} share out the weight of one batch alike and differ in scale, which the "
                f"learning rate must know: their weights sum to {sums}."
            )
    return sentences


def compared(ratio: float) -> str:
    """A ratio in words that go before a noun: "as much as", "1/5.4 of" or "2.3 times"."""
    if abs(ratio - 1) < _SAME:
        return "as much as"
    factor = max(ratio, 1 / ratio)
    places = 0 if factor >= 10 else 1 if factor >= 1.1 else 2
    digits = f"{factor:,.{places}f}".removesuffix(".0")
    return f"{digits} times" if ratio > 1 else f"1/{digits} of"


def number(value: float) -> str:
    """Three digits, or all in front of the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _response_with(reward_label: str) -> str:
    """`wrong (reward 0)` -> "wrong answer (reward 0)"; `reward 2` -> "response of reward 2"."""
    word, bracket, reward = reward_label.partition(" (")
    return f"{word} answer ({reward}" if bracket else f"response of {reward_label}"


def _listed(parts: list[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
