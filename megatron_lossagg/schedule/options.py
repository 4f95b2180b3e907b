"""The words that `LossAggregator` and `ScheduleContract` take, each declared once."""

from __future__ import annotations

from megatron_lossagg.words import Word, known, read_option


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


RETURNS = known(Returns)
CP_GRADIENTS = known(CPGradient)
CONTRACTS = known(ContractSource)
DENOMINATORS = known(Denominators)


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
