"""Losses of whole sequences when each context-parallel rank holds a part of every sequence.

Rows and packed sequences are cut by `slice_for_cp` (two chunks of each sequence per rank). The
objective is the sum over ranks of their local weighted losses, with weights and advantages that
differ from token to token, so that nothing cancels; its gradient with respect to every log-prob is
compared with one process that holds the whole sequences, whose formulas are proved in
tests/unit/test_token_losses_sequences.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_lossagg import ParallelGroups, slice_for_cp, token_losses

LOSSES = {
    "gspo": partial(token_losses.gspo, clip_low=0.2, clip_high=0.3),
    "gmpo": token_losses.gmpo,
    "tis": lambda x, old, a, mask, **where: (
        -a
        * x
        * token_losses.truncated_importance_weights(
            x, old, mask, level="sequence", cap=1.5, **where
        )
    ),
}
LENGTHS = (8, 5, 0, 13, 1)


def make_microbatch(is_packed, cp_size):
    """Fields of [4, 16], or of five sequences of LENGTHS (one empty), padded to multiples of 2C."""
    generator = torch.Generator().manual_seed(11)
    padded = [-(-length // (2 * cp_size)) * 2 * cp_size for length in LENGTHS]
    shape = (1, sum(padded)) if is_packed else (4, 16)
    x, old, advantages, weights = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.8
    microbatch = {
        "log_probs": x * 0.3 + old,
        "old_log_probs": old,
        "advantages": advantages,
        "weights": weights.abs(),
        "place": torch.arange(x.numel()).view(shape),
    }
    if not is_packed:
        mask[1, 4:] = False  # in chunks of some ranks only
        mask[2] = False
        return microbatch | {"loss_mask": mask}
    cu_seqlens, cu_seqlens_padded = (
        pad(torch.tensor(n).cumsum(0), (1, 0)).int() for n in (LENGTHS, padded)
    )
    ids = token_losses.sequence_ids_of(cu_seqlens, shape[1], cu_seqlens_padded=cu_seqlens_padded)
    return microbatch | {
        "loss_mask": mask & (ids >= 0),
        "sequence_ids": ids,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded,
    }


def run(name, microbatch, cp_group=None):
    """(places, losses, gradients) of this rank's tokens."""
    x = microbatch["log_probs"].clone().requires_grad_()
    where = {"cp_group": cp_group}
    if "cu_seqlens" in microbatch:
        where["sequence_ids"] = microbatch["sequence_ids"]
        where["num_sequences"] = microbatch["cu_seqlens"].numel() - 1
    losses = LOSSES[name](
        x, microbatch["old_log_probs"], microbatch["advantages"], microbatch["loss_mask"], **where
    )
    (losses * microbatch["weights"]).masked_fill(~microbatch["loss_mask"], 0).sum().backward()
    losses = losses.detach().masked_fill(~microbatch["loss_mask"], 0)
    return microbatch["place"].flatten(), losses.flatten(), x.grad.flatten()


def _run_on_rank(name, is_packed, fault):
    microbatch = make_microbatch(is_packed, dist.get_world_size())
    groups = ParallelGroups(cp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    part = slice_for_cp(microbatch, groups)
    if fault is None:
        return run(name, part, groups.cp)
    if fault == "no-group":
        return run(name, part)
    from megatron_lossagg.token_losses import sequence_stats

    summed = sequence_stats._AllReduceSum.backward
    sequence_stats._AllReduceSum.backward = staticmethod(lambda ctx, grad: (grad, None))
    try:
        return run(name, part, groups.cp)
    finally:
        sequence_stats._AllReduceSum.backward = summed


def errors(rank_pool, name, is_packed, cp_size, fault=None):
    """The largest error of the ranks' losses and gradients, as absolute numbers around 1."""
    results = rank_pool.run(_run_on_rank, name, is_packed, fault, world_size=cp_size, timeout_s=120)
    places, losses, gradients = (torch.cat(parts) for parts in zip(*results, strict=True))
    assert places.sort().values.equal(torch.arange(len(places)))
    _, expected, expected_gradient = run(name, make_microbatch(is_packed, cp_size))
    assert (expected_gradient != 0).sum() > 10
    return (
        float((losses - expected[places]).abs().max()),
        float((gradients - expected_gradient[places]).abs().max()),
    )


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_whole_sequences(rank_pool, name, is_packed, cp_size):
    """Every token's loss and gradient: 1e-13."""
    pytest.importorskip("megatron.core")
    assert max(errors(rank_pool, name, is_packed, cp_size)) <= 1e-13


@pytest.mark.parametrize(
    ("name", "fault", "loss_is_wrong"),
    [
        ("gspo", "no-group", True),
        ("gmpo", "no-group", True),
        ("tis", "no-group", True),
        ("gmpo", "local-backward", False),
    ],
)
def test_the_comparison_finds_what_is_missing(rank_pool, name, fault, loss_is_wrong):
    """Without the reduction losses are wrong; without it in the backward pass, GMPO's gradient."""
    pytest.importorskip("megatron.core")
    loss_error, gradient_error = errors(rank_pool, name, True, 2, fault)
    assert (loss_error > 1e-3) == loss_is_wrong
    assert gradient_error > 1e-3
