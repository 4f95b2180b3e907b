"""Groups of a collection: what it must have, and what it may lack."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from one_process import FakeGroup

from megatron_lossagg import LossAggError, ParallelGroups


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    """A stand-in for megatron.core.parallel_state, which tells the virtual stages."""
    state = SimpleNamespace(get_virtual_pipeline_model_parallel_world_size=lambda: 2)
    core = SimpleNamespace(parallel_state=state)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "megatron.core", core)


def collection(**fields):
    sizes = {"dp": 2, "cp": 2, "dp_cp": 4, "pp": 1, "tp": 3}
    return SimpleNamespace(**{name: FakeGroup(size) for name, size in sizes.items()}, **fields)


def test_the_group_of_a_whole_stage_is_taken_where_there_is_one():
    """tp x dp x cp; a collection without it is as good."""
    stage = FakeGroup(12)
    assert ParallelGroups.from_megatron(collection(tp_dp_cp=stage)).tp_dp_cp is stage
    without = ParallelGroups.from_megatron(collection())
    assert without.tp_dp_cp is None and without.num_virtual_stages == 2


def test_a_missing_group_is_named():
    """None would mean the whole world."""
    groups = collection()
    groups.tp = None
    del groups.cp
    with pytest.raises(LossAggError, match="pg_collection lacks cp, tp; the loss needs dp, cp"):
        ParallelGroups.from_megatron(groups)
