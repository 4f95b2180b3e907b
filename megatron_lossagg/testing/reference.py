"""What a loss and its gradient should be: one process, the whole batch, plain loops and autograd.

Shares no code with the plugin, so that the two can be compared: a mode is a name whose definition
is spelled out here, or a function that the caller hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import build_model_chunks
from megatron_lossagg.testing.model.parameter_names import named_parameters
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.ranks.parallel import current_device, initialize_model_parallel

TokenLossFn = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class BatchCounts:
    """What the weights of a mode of one's own may depend on, besides the sequence's n_s.

    Attributes:
        num_tokens: T.
        num_seqs: B, by `sequence_count`; at least 1.
        num_valid_seqs: sequences with a token that counts.
    """

    num_tokens: int
    num_seqs: int
    num_valid_seqs: int


# (n_s, at least 1; counts) -> the weight of each token of the sequence.
SequenceWeight = Callable[[int, BatchCounts], float]


def reference_loss(
    losses: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str | SequenceWeight,
    *,
    loss_scale_factor: float | None = None,
    norm_semantics: str = "sum",
    sequence_count: str = "valid",
    sample_mask: torch.Tensor | None = None,
    unit_ids: torch.Tensor | None = None,
    num_units: int | None = None,
) -> torch.Tensor:
    """The scalar J of a whole global batch, in float64, straight from the definition of its mode.

    token-mean: sum over tokens / T. token-sum: sum over tokens. seq-mean-token-sum: sum over
    tokens / B. seq-mean-token-mean: mean over sequences of the mean over tokens.
    seq-mean-token-sum-norm: sum over tokens / L, and / B if norm_semantics is "seq-mean".
    unit-mean-token-sum: mean over units of the sum over the unit's tokens.
    unit-mean-token-mean: mean over units of the mean over the unit's tokens.
    unit-mean-seq-mean-token-mean: mean over units of the mean over its sequences of token means.
    length-power-A: sum over sequences of (sum over tokens / n_s^A) / B.
    Any other mode is passed as its definition, a function: sum over sequences of
    weight(n_s, counts) * (sum over tokens).

    Args:
        losses: [num_seqs, width], one value per token.
        loss_mask: [num_seqs, width], non-zero at tokens that count.
        loss_agg_mode: one of the above, or the function of a mode that is none of them.
        loss_scale_factor: L.
        norm_semantics: "sum" or "seq-mean".
        sequence_count: whether B and the units count those with a valid token ("valid") or all
            ("nominal").
        sample_mask: [num_seqs], 0 at rows that are padding: they count nowhere.
        unit_ids: [num_seqs], the unit of each sequence.
        num_units: units of the batch. Default: the highest of the `unit_ids` and one.

    Returns:
        float64 scalar; exactly 0 if nothing counts.

    Raises:
        ValueError: a name that is none of the above, or a mode without the L it needs.
    """
    sequences = _sequences_that_count(losses, loss_mask, sample_mask, unit_ids)
    valid = [sequence for sequence in sequences if sequence.num_tokens > 0]
    num_seqs = max(1, len(valid if sequence_count == "valid" else sequences))
    if callable(loss_agg_mode):
        counts = BatchCounts(sum(s.num_tokens for s in sequences), num_seqs, len(valid))
        return _sum(loss_agg_mode(s.num_tokens, counts) * s.token_sum for s in valid)
    if loss_agg_mode == "token-mean":
        return _token_mean(sequences)
    if loss_agg_mode == "token-sum":
        return _token_sum(sequences)
    if loss_agg_mode == "seq-mean-token-sum":
        return _token_sum(sequences) / num_seqs
    if loss_agg_mode == "seq-mean-token-mean":
        return _mean_of_token_means(sequences) * len(valid) / num_seqs
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None:
            raise ValueError("reference_loss: seq-mean-token-sum-norm needs loss_scale_factor")
        per_length = _token_sum(sequences) / loss_scale_factor
        return per_length / num_seqs if norm_semantics == "seq-mean" else per_length
    if loss_agg_mode in _OF_A_UNIT:
        of_unit, valid_units = _OF_A_UNIT[loss_agg_mode], {sequence.unit for sequence in valid}
        means = (of_unit([s for s in sequences if s.unit == unit]) for unit in valid_units)
        if sequence_count == "valid" or unit_ids is None:
            return _sum(means) / max(1, len(valid_units))
        return _sum(means) / (int(unit_ids.max()) + 1 if num_units is None else num_units)
    if loss_agg_mode.startswith("length-power-"):
        exponent = float(loss_agg_mode.removeprefix("length-power-"))
        return _sum(s.token_sum / s.num_tokens**exponent for s in valid) / num_seqs
    raise ValueError(
        f"reference_loss: unknown loss_agg_mode {loss_agg_mode!r}; for a mode of your own pass the "
        "function (n_s, counts) -> weight that defines it"
    )


def reference_run(
    gpt: TinyGPT,
    batch: GlobalBatch,
    token_loss_fn: TokenLossFn,
    loss_agg_mode: str | SequenceWeight,
    **mode_arguments: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the whole batch by plain autograd: no schedule, no DDP, no microbatches.

    Every rank of the default process group, whatever its size, computes the same on its own.

    Args:
        gpt: the model; one Megatron `GPTModel` without pipeline.
        batch: its rows are used in order; the assignment does not matter.
        token_loss_fn: (logits [num_rows, width, vocab], rows) -> losses [num_rows, width].
        loss_agg_mode: see `reference_loss`.
        **mode_arguments: for `reference_loss`. `sample_mask` and `unit_ids` are taken from the
            rows if they are there.

    Returns:
        (loss, global parameter name -> gradient).
    """

    def objective(logits: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from_rows = {key: rows[key] for key in ("sample_mask", "unit_ids") if key in rows}
        losses = token_loss_fn(logits, dict(rows))
        return reference_loss(
            losses, rows["loss_mask"], loss_agg_mode, **{**from_rows, **mode_arguments}
        )

    return reference_gradient(gpt, batch, objective)


def reference_gradient(
    gpt: TinyGPT,
    batch: GlobalBatch,
    objective: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
) -> tuple[float, dict[str, torch.Tensor]]:
    """As `reference_run`, for any scalar function of the logits and the rows of the whole batch.

    Args:
        gpt: the model.
        batch: its rows are used in order.
        objective: (logits [num_rows, width, vocab], rows) -> scalar.

    Returns:
        (value, global parameter name -> gradient).
    """
    if dist.is_initialized():
        # Data parallelism without DDP: each rank has the whole model, and nothing communicates.
        layout = Layout(dp=dist.get_world_size())
    else:
        layout = Layout()
    initialize_model_parallel(layout)
    [model] = build_model_chunks(gpt, layout, wrap_with_ddp=False)
    rows = {name: tensor.to(current_device()) for name, tensor in batch.rows.items()}
    logits = model(rows["tokens"], rows["position_ids"], None)
    loss = objective(logits, rows)
    if loss.requires_grad:
        loss.backward()
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().clone()
        for name, p in named_parameters(model)
    }
    return loss.item(), gradients


@dataclass(frozen=True)
class _Sequence:
    """The sum over its tokens that count, how many these are, and its unit."""

    token_sum: torch.Tensor
    num_tokens: int
    unit: int


def _sequences_that_count(
    losses: torch.Tensor,
    loss_mask: torch.Tensor,
    sample_mask: torch.Tensor | None,
    unit_ids: torch.Tensor | None,
) -> list[_Sequence]:
    sequences = []
    for row in range(losses.shape[0]):
        if sample_mask is not None and not bool(sample_mask[row]):
            continue
        token_sum, num_tokens = torch.zeros((), dtype=torch.float64), 0
        for position in range(losses.shape[1]):
            if bool(loss_mask[row, position]):
                token_sum = token_sum + losses[row, position].double().cpu()
                num_tokens += 1
        unit = int(unit_ids[row]) if unit_ids is not None else 0
        sequences.append(_Sequence(token_sum, num_tokens, unit))
    return sequences


def _token_sum(sequences: list[_Sequence]) -> torch.Tensor:
    return _sum(s.token_sum for s in sequences)


def _token_mean(sequences: list[_Sequence]) -> torch.Tensor:
    return _token_sum(sequences) / max(1, sum(s.num_tokens for s in sequences))


def _mean_of_token_means(sequences: list[_Sequence]) -> torch.Tensor:
    valid = [s for s in sequences if s.num_tokens > 0]
    return _sum(s.token_sum / s.num_tokens for s in valid) / max(1, len(valid))


_OF_A_UNIT = {
    "unit-mean-token-sum": _token_sum,
    "unit-mean-token-mean": _token_mean,
    "unit-mean-seq-mean-token-mean": _mean_of_token_means,
}


def _sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = total + term
    return total
