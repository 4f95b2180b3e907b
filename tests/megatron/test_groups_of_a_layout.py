"""Property: the groups read from Megatron's parallel state are those of the layout."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_lossagg import ParallelGroups
from megatron_lossagg.testing import Layout, initialize_model_parallel


def stage_of_rank(text):
    initialize_model_parallel(Layout.parse(text))
    groups = ParallelGroups.from_megatron()
    sizes = (groups.tp_size, groups.dp_size, groups.cp_size)
    return groups.pp_rank, sizes, dist.get_process_group_ranks(groups.tp_dp_cp)


@pytest.mark.parametrize("text", ["PP=2 D=2 M=2", "TP=2 C=2 M=1", "PP=2 TP=2 M=2", "C=2 D=2 M=1"])
def test_tp_dp_cp_holds_all_ranks_of_a_pipeline_stage(rank_pool, text):
    """Those of this rank's stage and no others, on every rank."""
    layout = Layout.parse(text)
    found = rank_pool.run(stage_of_rank, text, world_size=layout.world_size)
    stages = [stage for stage, _, _ in found]
    for stage, sizes, ranks in found:
        assert sizes == (layout.tp, layout.dp, layout.cp)
        assert sorted(ranks) == [rank for rank, other in enumerate(stages) if other == stage]
