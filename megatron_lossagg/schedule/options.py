"""The words that `LossAggregator` and `ScheduleContract` take, each declared once."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar


class Word(str, Enum):
    """A member is, compares and prints as its string."""

    __str__ = str.__str__


class Returns(Word):
    """What `loss_func` gives the schedule; AUTO: the kind that the config's flag suits."""

    AUTO = "auto"
    LOSS = "loss"
    LOSS_AND_NUM_TOKENS = "loss_and_num_tokens"


class CPGradient(Word):
    """How token losses relate to the C context-parallel ranks.

    LOCAL: each rank has the losses of its chunk. REPLICATED_VALUE: every rank has all values, with
    a gradient only in its chunk. GATHERED: every rank has all values through a gather whose
    backward sums over the ranks.
    """

    LOCAL = "local"
    REPLICATED_VALUE = "replicated-value"
    GATHERED = "gathered"


class ContractSource(Word):
    """The option `contract`: believe what the config says, or measure it before the first step."""

    DETECT = "detect"
    MEASURE = "measure"


class Denominators(Word):
    """When the counts of a step are known: before its first loss, or once it is finalized."""

    COUNTED = "counted"
    DEFERRED = "deferred"


def known(words: type[Word]) -> tuple[str, ...]:
    """The strings that an option may be."""
    return tuple(word.value for word in words)


RETURNS = known(Returns)
CP_GRADIENTS = known(CPGradient)
CONTRACTS = known(ContractSource)
DENOMINATORS = known(Denominators)

AnyWord = TypeVar("AnyWord", bound=Word)


def read_option(words: type[AnyWord], name: str, value: Any) -> AnyWord:
    """The member of `words` that `value` is.

    Raises:
        ValueError: none; the message has the option's `name`, the value and the known ones.
    """
    try:
        return words(value)
    except ValueError:
        raise ValueError(
            f"{name}={value!r} does not exist; expected one of {', '.join(known(words))}."
        ) from None


def check_options(
    *,
    returns: str,
    cp_gradient: str,
    contract: str = ContractSource.DETECT,
    denominators: str = Denominators.COUNTED,
) -> None:
    """Raise ValueError on an unknown value of one of these options."""
    read_option(Denominators, "denominators", denominators)
    read_option(ContractSource, "contract", contract)
    read_option(Returns, "returns", returns)
    read_option(CPGradient, "cp_gradient", cp_gradient)
