"""`Word`: an option that is one of a few texts, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar


class Word(str, Enum):
    """A member is, compares and prints as its string."""

    __str__ = str.__str__
    __repr__ = str.__repr__


AnyWord = TypeVar("AnyWord", bound=Word)


def read_option(words: type[AnyWord], name: str, value: Any) -> AnyWord:
    """The member of `words` that `value` is.

    Args:
        words: the enum.
        name: of the option, for the message.
        value: a member, or its text.

    Returns:
        The member.

    Raises:
        ValueError: it is none.
    """
    try:
        return words(value)
    except ValueError:
        raise ValueError(
            f"{name}={value!r} does not exist; expected one of {', '.join(known(words))}."
        ) from None


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with texts instead of words, for files."""
    return {k: v.value if isinstance(v, Word) else v for k, v in values.items()}


def known(words: type[Word]) -> tuple[str, ...]:
    """The strings that an option may be."""
    return tuple(word.value for word in words)
