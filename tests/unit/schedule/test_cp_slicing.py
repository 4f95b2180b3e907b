"""slice_for_cp around a stand-in for Megatron's slicer; tests/distributed has the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from one_process import FakeGroup

from megatron_lossagg import ParallelGroups, slice_for_cp


def cp_groups(size, rank):
    return ParallelGroups(cp=FakeGroup(size, rank), dp_cp=FakeGroup(size, rank))


def zigzag(width, size, rank):
    """The positions of a rank: chunks r and 2C-1-r of 2C."""
    chunk = width // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return [*range(first, first + chunk), *range(second, second + chunk)]


def slice_in_place(batch, cp_group):
    """As Megatron does it: every value of the dict, in the dict that was given."""
    for key, value in batch.items():
        dim = 2 if key == "attention_mask" else 1
        positions = zigzag(value.shape[dim], cp_group.size(), cp_group.rank())
        batch[key] = value.index_select(dim, torch.tensor(positions))
    return batch


@pytest.fixture(params=["cp_group", "is_hybrid_cp", "parallel-state"])
def megatron_slicer(request, monkeypatch):
    """The signatures that releases have; the oldest reads the group from parallel_state."""
    state = SimpleNamespace(groups=None)

    def with_cp_group(batch, cp_group=None):
        return slice_in_place(batch, cp_group)

    def with_is_hybrid_cp(batch, is_hybrid_cp, cp_group=None):
        assert is_hybrid_cp is False
        return slice_in_place(batch, cp_group)

    def of_parallel_state(batch):
        return slice_in_place(batch, state.groups.cp)

    slicer = {
        "cp_group": with_cp_group,
        "is_hybrid_cp": with_is_hybrid_cp,
        "parallel-state": of_parallel_state,
    }[request.param]
    utils = SimpleNamespace(get_batch_on_this_cp_rank=slicer)
    core = SimpleNamespace(utils=utils)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.utils", utils)
    return state


@pytest.mark.parametrize(("width", "size"), [(8, 2), (12, 3), (4, 1)])
def test_all_fields_of_the_row_width_are_cut_alike(megatron_slicer, width, size):
    """Tokens, mask, weights, 3-d fields, attention_mask in dim 2; all ranks together have all."""
    tokens = torch.arange(2 * width).view(2, width)
    microbatch = {
        "tokens": tokens,
        "loss_mask": tokens % 2,
        "loss_weights": tokens.double() / 7,
        "hidden": tokens[..., None].expand(2, width, 3),
        "attention_mask": torch.ones(2, 1, width, width).cumsum(dim=2),
    }
    seen = []
    for rank in range(size):
        megatron_slicer.groups = cp_groups(size, rank)
        part = slice_for_cp(microbatch, megatron_slicer.groups)
        positions = zigzag(width, size, rank) if size > 1 else list(range(width))
        for key in ("tokens", "loss_mask", "loss_weights", "hidden"):
            assert torch.equal(part[key], microbatch[key][:, positions])
        attention_mask = microbatch["attention_mask"][:, :, positions]
        assert torch.equal(part["attention_mask"], attention_mask)
        seen += positions
    assert sorted(seen) == list(range(width))


def test_other_fields_are_kept_and_the_dict_is_not_changed(megatron_slicer):
    """[b] fields, None, objects and fields of another width pass; slicing twice starts afresh."""
    marker = object()
    microbatch = {
        "loss_mask": torch.ones(2, 8),
        "old_log_probs": torch.rand(8, 2).t(),
        "rewards": torch.ones(2),
        "scales": torch.ones(2, 3),
        "attention_mask": None,
        "marker": marker,
    }
    before = dict(microbatch)
    megatron_slicer.groups = cp_groups(2, 1)
    for _ in range(2):
        part = slice_for_cp(microbatch, megatron_slicer.groups)
        assert part is not microbatch and part.keys() == microbatch.keys()
        assert part["loss_mask"].shape == part["old_log_probs"].shape == (2, 4)
        assert all(part[key] is before[key] for key in ("rewards", "scales", "marker"))
        assert part["attention_mask"] is None
    assert all(microbatch[key] is before[key] for key in before)


def test_without_context_parallelism_nothing_is_imported(monkeypatch):
    """C = 1: a shallow copy, whatever the fields are."""
    monkeypatch.setitem(sys.modules, "megatron", None)
    microbatch = {"tokens": torch.ones(1, 3), "cu_seqlens": torch.tensor([0, 3])}
    part = slice_for_cp(microbatch, ParallelGroups.single_process())
    assert part == microbatch and part is not microbatch


@pytest.mark.parametrize("width", [4, 6, 10])
def test_width_that_cannot_be_split(width):
    """C = 4 needs a multiple of 8; the message says so."""
    with pytest.raises(ValueError, match=f"width {width} .* multiple of 8. Pad the rows"):
        slice_for_cp({"tokens": torch.ones(1, width)}, cp_groups(4, 0))


def test_rows_of_different_widths():
    """Labels one token longer than the mask would silently stay whole."""
    microbatch = {"loss_mask": torch.ones(2, 8), "labels": torch.ones(2, 9)}
    with pytest.raises(ValueError, match="rows of one width, got {'loss_mask': 8, 'labels': 9}"):
        slice_for_cp(microbatch, cp_groups(2, 0))


@pytest.mark.parametrize("microbatch", [{}, {"rewards": torch.ones(2)}, {"tokens": torch.ones(8)}])
def test_width_that_nothing_tells(microbatch):
    """The fields that are looked at are named, and those that are there."""
    with pytest.raises(ValueError, match="cannot tell the row width: expected 'loss_mask', 'tok"):
        slice_for_cp(microbatch, cp_groups(2, 0))


def test_packed_sequences_are_cut_one_by_one():
    """Each sequence zigzag at its padded length; boundaries stay whole, however wide."""
    microbatch = {
        "tokens": torch.arange(20)[None],
        "loss_mask": torch.ones(1, 20),
        "cu_seqlens": torch.tensor([[0, 7, 11, 18, 18]]),
        "cu_seqlens_padded": torch.tensor([[0, 8, 12, 20, 20]]),
    }
    parts = [slice_for_cp(microbatch, cp_groups(2, rank)) for rank in range(2)]
    assert parts[0]["tokens"].tolist() == [[0, 1, 6, 7, 8, 11, 12, 13, 18, 19]]
    assert parts[1]["tokens"].tolist() == [[2, 3, 4, 5, 9, 10, 14, 15, 16, 17]]
    assert all(torch.equal(p["cu_seqlens"], microbatch["cu_seqlens"]) for p in parts)
    four = {"tokens": torch.arange(4)[None], "cu_seqlens": torch.tensor([[0, 4, 4, 4]])}
    assert slice_for_cp(four, cp_groups(2, 0))["cu_seqlens"].shape == (1, 4)


def test_packed_lengths_that_cannot_be_split():
    """Every padded length must be a multiple of 2C, and together they fill the row."""
    microbatch = {"loss_mask": torch.ones(1, 8), "cu_seqlens": torch.tensor([0, 3, 8])}
    with pytest.raises(ValueError, match=r"lengths \[3, 5\] in a row of 8 .* multiple of 4"):
        slice_for_cp(microbatch, cp_groups(2, 0))
