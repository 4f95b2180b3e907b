"""Whether a batch, a layout and a model fit together."""

from __future__ import annotations

from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.batch.packed_batch import PackedBatch
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT


def check_fits(batch: GlobalBatch | PackedBatch, layout: Layout, gpt: TinyGPT) -> None:
    """Check a run's arguments on every rank alike, so that none waits for another that raised.

    Args:
        batch: of the run.
        layout: of the run.
        gpt: of the run.

    Raises:
        ValueError: sizes that do not fit together, and what would.
    """
    if (batch.dp_size, batch.num_microbatches) != (layout.dp, layout.num_microbatches):
        raise ValueError(
            f"run_global_batch: the batch is assigned to D={batch.dp_size} M="
            f"{batch.num_microbatches}, but the layout is '{layout}': use batch.split(layout.dp, "
            "layout.num_microbatches) or give the batch another assignment"
        )
    shapes = [batch.shapes(rank) for rank in range(batch.dp_size)]
    widths = sorted({width for rank in shapes for _, width in rank})
    if any(width % layout.width_multiple for width in widths):
        raise ValueError(
            f"run_global_batch: the width of the batch must be a multiple of "
            f"{layout.width_multiple} for layout '{layout}', got {widths}"
        )
    if batch.longest_sequence > gpt.max_sequence_length:
        raise ValueError(
            f"run_global_batch: sequences may be at most max_sequence_length="
            f"{gpt.max_sequence_length} long, got {batch.longest_sequence}"
        )
    if layout.pp > 1 and not gpt.overrides.get("variable_seq_lengths"):
        for rank, of_rank in enumerate(shapes):
            if len(set(of_rank)) > 1:
                raise ValueError(
                    f"run_global_batch: with PP={layout.pp} the microbatches of a data-parallel "
                    f"rank need one shape, got {of_rank} on rank {rank}; use "
                    "TinyGPT(overrides={'variable_seq_lengths': True})"
                )
