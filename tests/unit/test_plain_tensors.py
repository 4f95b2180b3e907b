"""Nested tensors, lists of rows and TensorDicts: one sentence that says what to pass instead."""

from __future__ import annotations

import pytest
import torch
from one_process import make_microbatch, model_config

from megatron_lossagg import (
    GlobalCounts,
    LossAggError,
    LossAggregator,
    ParallelGroups,
    agg_loss,
    count_global_batch,
    log_probs_from_logits,
    slice_for_cp,
    token_losses,
    token_weights,
)

ALONE = ParallelGroups.single_process()
LAYOUTS = [torch.jagged, torch.strided]
PADDED = r"is a nested tensor, .* torch.nested.to_padded_tensor\({}, 0\)"
# torch says so of every strided nested tensor that is made.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(layout, dtype=torch.float32):
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout, dtype=dtype)


class NoMapping:
    """Has the methods of a mapping, as a TensorDict does, and is none."""

    def __init__(self, fields):
        self._fields = fields

    def keys(self):
        return self._fields.keys()

    def items(self):
        return self._fields.items()


def aggregator(**options):
    options = {"loss_agg_mode": "token-mean", **options}
    return LossAggregator(
        lambda output, microbatch: output, model_config=model_config(), groups=ALONE, **options
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_masks(layout):
    """Wherever a mask is read: a step, a stream, the counts, the weights, the losses."""
    mask = nested(layout)
    message = PADDED.format("loss_mask")
    with pytest.raises(TypeError, match=message):
        aggregator().begin_step([{"loss_mask": mask}])
    with pytest.raises(TypeError, match=message):
        next(aggregator().wrap(iter([{"loss_mask": mask}]), num_microbatches=1))
    with pytest.raises(TypeError, match=message):
        count_global_batch([mask], ALONE)
    with pytest.raises(TypeError, match=message):
        token_weights(mask, "token-mean", GlobalCounts(5, 2, 2))
    with pytest.raises(TypeError, match=message):
        agg_loss(torch.ones(2, 3), mask, "token-mean")
    with pytest.raises(TypeError, match=message):
        token_losses.kl_penalty(torch.ones(2, 3), torch.ones(2, 3), mask)
    with pytest.raises(TypeError, match=message):
        log_probs_from_logits(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.int64), mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_fields_beside_a_mask(layout):
    """sample_mask, cu_seqlens, unit_ids."""
    integers = nested(layout, torch.int64)
    rows = make_microbatch([[1.0] * 3] * 2, [[1] * 3] * 2)
    packed = make_microbatch([[1.0] * 5], [[1] * 5])
    units = {"loss_agg_mode": "unit-mean-token-mean"}
    for microbatch, options in (
        (rows | {"sample_mask": integers}, {}),
        (packed | {"cu_seqlens": integers}, {}),
        (packed | {"cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_padded": integers}, {}),
        (rows | {"unit_ids": integers}, units),
    ):
        name = list(microbatch)[-1]
        with pytest.raises(TypeError, match=rf"{name} is a nested .*: {name}.values\(\)"):
            aggregator(**options).begin_step([microbatch], num_units=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_losses(layout):
    """What loss_fn returns, and what token losses and agg_loss are given."""
    losses, mask = nested(layout), torch.ones(2, 3)
    step = aggregator().begin_step([{"loss_mask": mask}])
    with pytest.raises(TypeError, match=r"loss_fn returned a nested .*\(losses, 0, weights.sh"):
        step.loss_func(step.microbatches[0], losses)
    with pytest.raises(TypeError, match=PADDED.format("loss_mat")):
        agg_loss(losses, mask, "token-mean")
    with pytest.raises(TypeError, match=PADDED.format("log_probs")):
        token_losses.kl_penalty(losses, mask, mask)
    labels = nested(layout, torch.int64)
    with pytest.raises(TypeError, match=PADDED.format("labels")):
        log_probs_from_logits(torch.ones(2, 3, 4), labels)


def test_nested_fields_are_not_sliced():
    """A field that cannot be cut would lose its alignment with those that are."""
    groups = ParallelGroups(cp=_Two(), dp_cp=_Two())
    for name in ("loss_mask", "responses"):
        microbatch = {"tokens": torch.ones(2, 4), name: nested(torch.jagged)}
        with pytest.raises(TypeError, match=PADDED.format(name)):
            slice_for_cp(microbatch, groups)


class _Two:
    def size(self):
        return 2

    def rank(self):
        return 0


@pytest.mark.parametrize("rows", [list, tuple])
def test_a_list_of_rows_as_mask(rows):
    """Of several lengths, as rollouts come."""
    masks = rows([torch.ones(3), torch.ones(2)])
    message = rf"got {rows.__name__} of tensors. Pass one \[b, s\]: .*pad_sequence\(loss_mask, "
    with pytest.raises(TypeError, match=message):
        aggregator().begin_step([{"loss_mask": masks}])
    with pytest.raises(TypeError, match=r"torch.stack\(unit_ids\) or torch.cat\(unit_ids\)"):
        aggregator(loss_agg_mode="unit-mean-token-mean").begin_step(
            [{"loss_mask": torch.ones(2, 3), "unit_ids": rows([torch.tensor(0)] * 2)}], num_units=1
        )
    with pytest.raises(TypeError, match=r"loss_mask must be a tensor, got list\.$"):
        aggregator().begin_step([{"loss_mask": [[1, 0], [1, 1]]}])


def test_microbatches_that_are_no_dicts():
    """A TensorDict has a dict's methods; it is said how to make it one. Other objects are named."""
    alike = NoMapping({"loss_mask": torch.ones(2, 3)})
    hint = r"NoMapping.*Pass dict\(microbatch.items\(\)\)\."
    with pytest.raises(TypeError, match=f"Microbatch 0 is a {hint}"):
        aggregator().begin_step([alike])
    with pytest.raises(TypeError, match=f"slice_for_cp expects a dict of tensors, got {hint}"):
        slice_for_cp(alike, ALONE)
    step = aggregator().begin_step([dict(alike.items())])
    with pytest.raises(LossAggError, match=hint):
        step.loss_func(alike, torch.ones(2, 3))
    for other in (torch.ones(2, 3), [1], None):
        with pytest.raises(TypeError, match=r"expected a dict of tensors with 'loss_mask'\.$"):
            aggregator().begin_step([other])
