"""What the Megatron schedule, DDP and finalize do to a returned loss, and how to undo it.

S is this rank's and microbatch's partial sum of w * l, M the microbatches of the schedule call, D
the data-parallel and C the context-parallel size (read in `forward_step_calc_loss`,
`finalize_model_grads` and `DistributedDataParallel` of megatron-core 0.13 to 0.19), and n the valid
tokens of this rank's part of the microbatch:

    regime  calculate_per_token_loss  schedule   DDP              finalize             so return
    R1      False                     x C, / M   mean over D * C  -                    S * M * D
    R3      True                      -          sum over D * C   / sum of n over all  S * T, n
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups

CP_GRADIENTS = ("local", "replicated-value", "gathered")
RETURNS = ("auto", "loss", "loss_and_num_tokens")
# Megatron sums num_tokens in int32.
MAX_NUM_TOKENS_R3 = 2**31 - 1


@dataclass(frozen=True)
class ScheduleContract:
    """The regime of a schedule and the factors that a returned loss must carry in it.

    Attributes:
        regime: "R1" (two values, mean over ranks) or "R3" (three values, sum over ranks, divided by
            the global token count in `finalize_model_grads`).
        dp_size: D.
        cp_size: C.
        cp_gradient: how token losses relate to context-parallel ranks: "local" (each rank has the
            losses of its chunk), "replicated-value" (every rank has all values, gradient only in
            its chunk), "gathered" (every rank has all values through a gather whose backward sums
            over the group).
    """

    regime: str
    dp_size: int
    cp_size: int
    cp_gradient: str = "local"

    @classmethod
    def detect(
        cls,
        model_config: Any,
        groups: ParallelGroups,
        *,
        returns: str = "auto",
        cp_gradient: str = "local",
    ) -> ScheduleContract:
        """Read the regime from the model's `TransformerConfig`. Does not communicate.

        Raises:
            ValueError: an unknown option.
            LossAggError: a configuration whose gradient would not be that of the global batch.
        """
        check_options(returns=returns, cp_gradient=cp_gradient)
        check_model_config(model_config)
        per_token = bool(model_config.calculate_per_token_loss)
        if returns == "loss" and per_token:
            raise LossAggError(
                "returns='loss' with calculate_per_token_loss=True: Megatron's finalize would "
                "divide by a token count that stays 0, so MoE and MTP losses go undivided. Use "
                "returns='auto' (three values), or set calculate_per_token_loss=False."
            )
        if returns == "loss_and_num_tokens" and not per_token:
            raise LossAggError(
                "returns='loss_and_num_tokens' with calculate_per_token_loss=False: the schedule "
                "would divide each microbatch by its own token count, and what it does beyond that "
                "depends on the release. Use returns='auto' (two values), or set "
                "calculate_per_token_loss=True."
            )
        _refuse_unproved(model_config, per_token)
        check_p2p_order(model_config, groups)
        return cls("R3" if per_token else "R1", groups.dp_size, groups.cp_size, cp_gradient)

    @property
    def returns_num_tokens(self) -> bool:
        """Whether `loss_func` returns three values and the weights carry a factor T."""
        return self.regime == "R3"

    @property
    def undo_cp_gather(self) -> float:
        """1/C if the backward of a gather sums over context-parallel ranks, else 1."""
        return 1.0 / self.cp_size if self.cp_gradient == "gathered" else 1.0

    @property
    def cp_copies(self) -> int:
        """On how many context-parallel ranks one token's value is present."""
        return 1 if self.cp_gradient == "local" else self.cp_size

    def loss_factor(self, num_microbatches: int) -> float:
        """The number that multiplies S (R1) or S * T (R3) before it is returned."""
        if self.regime == "R3":
            return self.undo_cp_gather
        undo_microbatch_mean = num_microbatches
        undo_data_parallel_mean = self.dp_size
        return undo_microbatch_mean * undo_data_parallel_mean * self.undo_cp_gather

    def schedule_factor(self, num_microbatches: int) -> float:
        """What the schedule multiplies the returned loss by: C / M in R1, nothing in R3."""
        return 1.0 if self.regime == "R3" else self.cp_size / num_microbatches


def check_model_config(model_config: Any) -> None:
    """Raise TypeError unless the flag that decides the regime can be read from it."""
    if not hasattr(model_config, "calculate_per_token_loss"):
        raise TypeError(
            "model_config must be the model's TransformerConfig, got "
            f"{type(model_config).__name__} without calculate_per_token_loss. Pass "
            "get_model_config(model), the object that the schedule reads."
        )


def check_options(*, returns: str, cp_gradient: str) -> None:
    """Raise ValueError on an unknown `returns` or `cp_gradient`."""
    if returns not in RETURNS:
        raise ValueError(
            f"returns={returns!r} does not exist; expected one of {', '.join(RETURNS)}."
        )
    if cp_gradient not in CP_GRADIENTS:
        raise ValueError(
            f"cp_gradient={cp_gradient!r} does not exist; expected one of "
            f"{', '.join(CP_GRADIENTS)}."
        )


def _refuse_unproved(model_config: Any, per_token: bool) -> None:
    """Raise on configurations in which the returned loss would not arrive as it should."""
    if getattr(model_config, "hybrid_context_parallel", False):
        raise LossAggError(
            "hybrid_context_parallel=True is not supported: its schedule regroups samples after "
            "the plan was made. Turn it off, or use a fixed context-parallel size."
        )
    if getattr(model_config, "mtp_num_layers", None) and not per_token:
        raise LossAggError(
            "mtp_num_layers with calculate_per_token_loss=False: Megatron divides the multi-token "
            "prediction loss by the local token count, which gives NaN on a fully masked "
            "microbatch. Set calculate_per_token_loss=True."
        )


def check_p2p_order(model_config: Any, groups: ParallelGroups) -> None:
    """Raise where an interleaved schedule on two pipeline ranks would mix up its messages.

    With two pipeline ranks both neighbours are the same rank. A batched exchange then posts several
    messages between one pair, which backends match in order of posting: activations and gradients
    change places and the numbers are wrong without an error.
    """
    interleaved = groups.num_virtual_stages > 1
    overlapped = bool(getattr(model_config, "overlap_p2p_comm", False))
    if groups.pp_size == 2 and interleaved and not overlapped:
        raise LossAggError(
            "Pipeline size 2 with virtual stages and overlap_p2p_comm=False: batched sends and "
            "receives between the same two ranks are matched in order and swap activations with "
            "gradients, silently. Set overlap_p2p_comm=True and batch_p2p_comm=False in the "
            "model's config."
        )


def uses_full_iteration_cuda_graph(model_config: Any) -> bool:
    """Whether a replayed step runs without entering Python, so that calls cannot be counted.

    Releases say it in `cuda_graph_scope` or in `cuda_graph_impl`, as a string or an enum.
    """
    scope = getattr(model_config, "cuda_graph_scope", None) or ()
    scopes = [scope] if isinstance(scope, str) else list(scope)
    settings = [*scopes, getattr(model_config, "cuda_graph_impl", None)]
    return any("full_iteration" in str(getattr(s, "name", s)) for s in settings)
