"""Which fields of a rollout hold its length, reward and group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from megatron_lossagg.explain.rollouts import Rollouts, RolloutsBuilder, shown

# Names that trainers write, the ones of this library first.
MASK_NAMES = ("loss_mask", "response_mask", "loss_masks", "token_loss_mask")
LENGTH_NAMES = ("response_length", "response_lengths", "completion_length", "num_tokens")
RESPONSE_NAMES = (
    "response_ids",
    "response_token_ids",
    "completion_ids",
    "response",
    "completion",
    "output",
    "responses",
)
REWARD_NAMES = ("reward", "rewards", "score", "scores")
GROUP_NAMES = (
    "group_id",
    "group_ids",
    "prompt_id",
    "unit_id",
    "unit_ids",
    "group_index",
    "uid",
    "prompt",
    "input",
)
_TEXT_UNITS: dict[str, Callable[[str], int]] = {
    "bytes": lambda text: len(text.encode("utf-8", "surrogatepass")),
    "words": lambda text: len(text.split()),
}
TEXT_UNITS = tuple(_TEXT_UNITS)


@dataclass(frozen=True)
class FieldOptions:
    """What the caller said about the fields; None is found by name.

    Attributes:
        mask: a list (or array [b, s]) of 0 and 1, whose sum is the length.
        length: the number of valid tokens.
        response: token ids, or text.
        reward: one number.
        group: text or an integer that the responses to one prompt share.
        text_unit: how text is counted, one of `TEXT_UNITS`.
    """

    mask: str | None = None
    length: str | None = None
    response: str | None = None
    reward: str | None = None
    group: str | None = None
    text_unit: str = "bytes"

    def __post_init__(self) -> None:
        lengths = (self.mask, self.length, self.response)
        named = [name for name in lengths if name is not None]
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, named))} both say how long a response is; name one of "
                "--mask-field, --length-field and --response-field"
            )
        if self.text_unit not in _TEXT_UNITS:
            raise ValueError(
                f"--unit {self.text_unit!r} does not exist; expected {' or '.join(_TEXT_UNITS)}"
            )


@dataclass(frozen=True)
class Fields:
    """The names that are read: `length_kind` is "mask", "length" or "response"."""

    length_kind: str
    length: str
    reward: str | None
    group: str | None

    def sources(self, length_origin: str) -> dict[str, str]:
        """Where each quantity comes from, in words."""
        named = {"reward": self.reward, "group": self.group}
        sources = {what: f"{name!r}" for what, name in named.items() if name is not None}
        return {"length": length_origin, **sources}

    @property
    def names(self) -> list[str]:
        """The fields to read."""
        return [name for name in (self.length, self.reward, self.group) if name is not None]

    @classmethod
    def choose(cls, available: Iterable[str], options: FieldOptions) -> Fields:
        """Take what the options name, else the first known name that is there.

        Args:
            available: the names of the file's fields.
            options: the fields that the caller named.

        Returns:
            The field of each kind, None for a kind that the file lacks.

        Raises:
            ValueError: a named field is missing, or nothing says how long a response is.
        """
        names = list(available)
        for named in (options.mask, options.length, options.response, options.reward):
            _check_there(named, names)
        _check_there(options.group, names)
        kinds = (
            ("mask", options.mask, MASK_NAMES),
            ("length", options.length, LENGTH_NAMES),
            ("response", options.response, RESPONSE_NAMES),
        )
        named_kinds = [(kind, named) for kind, named, _ in kinds if named is not None]
        found_kinds = [(kind, _first(known, names)) for kind, _, known in kinds]
        for kind, name in named_kinds or found_kinds:
            if name is not None:
                reward = options.reward or _first(REWARD_NAMES, names)
                group = options.group or _first(GROUP_NAMES, names)
                return cls(kind, name, reward, group)
        raise ValueError(
            "has no field that says how long a response is; its fields are "
            f"{', '.join(names) or '(none)'}. Expected one of "
            f"{', '.join((*MASK_NAMES, *LENGTH_NAMES, *RESPONSE_NAMES))}, or name yours with "
            "--mask-field, --length-field or --response-field"
        )


class RowReader:
    """Reads rows (mappings from field to value) into a `RolloutsBuilder`.

    The fields are `fields`, or chosen from those of the first row that have a value; every other
    row must have them.
    """

    def __init__(self, options: FieldOptions, fields: Fields | None = None) -> None:
        self._options = options
        self._builder = RolloutsBuilder()
        self._fields = fields
        self._is_text: bool | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Read one row; raises ValueError saying what is wrong with it."""
        if self._fields is None:
            filled = [name for name, value in row.items() if value is not None]
            self._fields = Fields.choose(filled, self._options)
        if self._is_text is None:
            self._is_text = isinstance(row.get(self._fields.length), str)
        fields = self._fields
        read: list[tuple[str | None, Callable[[Any], None]]] = [
            (fields.length, lambda value: self._builder.add_length(self._length(value))),
            (fields.reward, self._builder.add_reward),
            (fields.group, self._builder.add_group),
        ]
        for name, add in read:
            if name is None:
                continue
            if name not in row:
                raise ValueError(
                    f"has no {name!r}, which earlier rows have; its fields are "
                    f"{', '.join(row) or '(none)'}"
                )
            try:
                add(row[name])
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error

    def build(self) -> Rollouts:
        """All rows. Raises ValueError if there is nothing to weigh."""
        if self._fields is None:
            raise ValueError("has no responses in it")
        fields = self._fields
        unit = self._options.text_unit if self._is_text else "tokens"
        origin = {
            "mask": f"the sum of {fields.length!r}",
            "length": f"{fields.length!r}",
            "response": f"the token ids of {fields.length!r}",
        }[fields.length_kind]
        if self._is_text:
            counted = "UTF-8 bytes" if unit == "bytes" else "words, split at white space,"
            origin = f"{counted} of {fields.length!r}"
        return self._builder.build(unit, fields.sources(origin))

    def _length(self, value: Any) -> Any:
        assert self._fields is not None
        kind = self._fields.length_kind
        if kind == "length":
            return value
        if kind == "response" and isinstance(value, str) and self._is_text:
            return _TEXT_UNITS[self._options.text_unit](value)
        if isinstance(value, str) or not isinstance(value, Sized) or isinstance(value, Mapping):
            expected = {"mask": "a list of 0 and 1", "response": "a list of token ids"}[kind]
            if kind == "response":
                expected = "text" if self._is_text else f"text or {expected}"
            raise ValueError(f"expected {expected}, got {shown(value)}")
        return _mask_sum(value) if kind == "mask" else _num_ids(value, bool(self._is_text))


def _mask_sum(mask: Any) -> int:
    wrong = [value for value in mask if value not in (0, 1)]
    if wrong:
        raise ValueError(f"a mask may hold only 0 and 1, got {shown(wrong[0])}")
    return int(sum(mask))


def _num_ids(ids: Any, is_text: bool) -> int:
    if is_text:
        raise ValueError(f"expected text as in the first row, got {shown(ids)}")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected a list of token ids, got {shown(value)} in it")
    return len(ids)


def _first(known: Iterable[str], available: list[str]) -> str | None:
    return next((name for name in known if name in available), None)


def _check_there(name: str | None, available: list[str]) -> None:
    if name is not None and name not in available:
        raise ValueError(f"has no field {name!r}; its fields are {', '.join(available) or 'none'}")
