"""The masked weighted sum and the checks in front of it: no sync, no collective, no branch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from one_process import ALL_MODES, REGIMES, make_aggregator, make_microbatch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lossagg import LossAggError
from megatron_lossagg.loss import check_token_losses, masked_weighted_sum, weights_of

HOST_SYNCS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "unique", "index")


class RecordOps(TorchDispatchMode):
    """Collects the names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))

    def forbidden(self):
        return sorted(
            name
            for name in self.names
            if name.split(".")[1] in HOST_SYNCS or not name.startswith("aten.")
        )


def test_value_gradient_and_dtype():
    """S = sum of w * l over w != 0; the gradient is w; at least float32."""
    losses = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    weights = torch.tensor([[0.5, 0.0, 2.0]])
    total = masked_weighted_sum(losses, weights)
    assert total.dtype == torch.float32 and total.item() == 6.5
    total.backward()
    assert torch.equal(losses.grad.float(), weights)
    for losses_dtype, weights_dtype, expected in (
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ):
        total = masked_weighted_sum(
            torch.ones(1, 1, dtype=losses_dtype), torch.ones(1, 1, dtype=weights_dtype)
        )
        assert total.dtype == expected


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_counts_only_where_the_weight_is_not_zero(garbage):
    """Value and gradient are exact next to garbage at weight 0; garbage at a valid token shows."""
    losses = torch.tensor([[1.0, garbage]], requires_grad=True)
    total = masked_weighted_sum(losses, torch.tensor([[3.0, 0.0]]))
    total.backward()
    assert total.item() == 3.0 and losses.grad.tolist() == [[3.0, 0.0]]
    shown = masked_weighted_sum(losses, torch.tensor([[3.0, 1.0]]))
    assert not torch.isfinite(shown)


@REGIMES
@ALL_MODES
def test_loss_func_neither_syncs_nor_communicates(monkeypatch, mode, options, per_token):
    """No operator that reads a value on the host or selects by data, no collective, any mode."""
    for name in ("all_reduce", "broadcast", "all_gather", "barrier", "reduce", "send", "recv"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: pytest.fail("communicated"))
    step = make_aggregator(mode, per_token=per_token, **options).begin_step(
        [make_microbatch([[1.0, 2.0], [3.0, 4.0]], [[1, 1], [1, 0]])]
    )
    microbatch = next(step.data_iterator(1)[0])
    for non_loss_data in (False, True):
        with RecordOps() as ops:
            step.loss_func(microbatch, microbatch["losses"], non_loss_data=non_loss_data)
        assert any(name.startswith("aten.hardshrink_backward") for name in ops.names)
        assert ops.forbidden() == []


def test_the_recorder_sees_a_sync():
    """The test above can fail: reading a value or selecting by a mask is noticed."""
    values = torch.tensor([1.0, 2.0])
    for sync in (
        lambda: values.sum().item(),
        lambda: values[values > 1],
        lambda: bool(values[0] > 0),
    ):
        with RecordOps() as ops:
            sync()
        assert ops.forbidden() != []


@REGIMES
@ALL_MODES
def test_everything_about_a_step_is_in_the_weights(mode, options, per_token):
    """Under a replayed graph step 1's loss_func runs on step 2's data in the same buffers."""
    aggregator = make_aggregator(mode, per_token=per_token, **options)
    first = aggregator.begin_step([make_microbatch([[1.0, 2.0, 3.0]], [[1, 1, 1]])])
    second = aggregator.begin_step([make_microbatch([[7.0, 8.0, 9.0]], [[0, 1, 0]])])
    buffer, other = next(first.data_iterator()[0]), next(second.data_iterator()[0])
    expected = second.loss_func(other, other["losses"])
    with torch.no_grad():
        buffer["losses"].copy_(other["losses"])
        buffer["loss_weights"].copy_(other["loss_weights"])
    found = first.loss_func(buffer, buffer["losses"])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[-1]["loss"], expected[-1]["loss"])
    if per_token:
        assert found[1].item() == expected[1].item() == 1


@pytest.mark.parametrize(
    ("losses", "hint"),
    [
        (torch.tensor(1.0), r"shape \(\), .* shape \(2, 3\)\. It looks reduced already"),
        (torch.ones(2), r"shape \(2,\), .* It looks reduced already: return the loss of every"),
        (torch.ones(2, 4), r"shape \(2, 4\), .* shape \(2, 3\)\. .* slice_for_cp; otherwise"),
        (torch.ones(3, 2), r"check the mask's width"),
        (torch.ones(1, 3), r"shape \(1, 3\)"),
    ],
)
def test_losses_of_another_shape(losses, hint):
    """A reduced loss and a mask of another width get different advice; nothing broadcasts."""
    with pytest.raises(ValueError, match=hint):
        check_token_losses(losses, torch.ones(2, 3))


def test_reduced_loss_of_a_one_token_mask():
    """A scalar is not per token even if there is one token only."""
    with pytest.raises(ValueError, match="It looks reduced already"):
        check_token_losses(torch.tensor(1.0), torch.ones(1, 1))


@pytest.mark.parametrize("losses", [None, 1.0, (torch.ones(1, 1),), {"loss": 1}])
def test_losses_that_are_no_tensor(losses):
    """The type that came back from loss_fn is named."""
    with pytest.raises(TypeError, match="tensor of per-token losses, got") as caught:
        check_token_losses(losses, torch.ones(1, 1))
    assert type(losses).__name__ in str(caught.value)


def test_integer_losses():
    """Token ids or counts instead of losses."""
    with pytest.raises(TypeError, match=r"floating-point losses, got torch\.int64"):
        check_token_losses(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1))


@pytest.mark.parametrize("microbatch", [{}, {"loss_mask": 1, 5: 2}, torch.ones(1), None])
def test_microbatch_without_weights(microbatch):
    """What was found, which field is missing and where microbatches come from."""
    with pytest.raises(LossAggError, match=r"no weights under 'loss_weights' \(found: .*data_iter"):
        weights_of(microbatch, "loss_weights")


@pytest.mark.parametrize("raw", [torch.ones(1, 2).long(), torch.ones(1, 2).bool(), [[1, 0]]])
def test_weights_that_became_integers(raw):
    """A raw mask, or weights that a broadcast cast to integers, would count as 0 or 1."""
    with pytest.raises(
        TypeError, match="field 'loss_mask' given to loss_func is .* floating point"
    ):
        weights_of({"loss_mask": raw}, "loss_mask")
