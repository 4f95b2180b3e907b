"""The sequences of a microbatch behind one another in one row, as Megatron's "thd" format has them.

`pack_batch` gives the data of a `GlobalBatch` in this form: the same global batch, so the same
loss and the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.testing.batch.global_batch import GlobalBatch
from megatron_lossagg.testing.layout.layout import Layout

PACKED_FORMS = ("cu_seqlens", "cu_seqlens_padded")
# What padding holds, apart from the mask: not 0, so that padding that counts shows.
_FILL = 1


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The packed microbatches of one optimizer step.

    Attributes:
        of_ranks: for each data-parallel rank its microbatches, see `pack_rows`.
    """

    of_ranks: tuple[tuple[dict[str, Tensor], ...], ...]

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.of_ranks)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per data-parallel rank."""
        return len(self.of_ranks[0])

    @property
    def longest_sequence(self) -> int:
        """Positions that a model needs: one more than the largest of "position_ids"."""
        everything = [microbatch for rank in self.of_ranks for microbatch in rank]
        positions = (m["position_ids"] for m in everything if "position_ids" in m)
        return max((int(p.max()) + 1 for p in positions), default=0)

    def shapes(self, dp_rank: int) -> list[tuple[int, int]]:
        """(1, t) of each microbatch of a data-parallel rank."""
        return [(1, microbatch["loss_mask"].shape[1]) for microbatch in self.of_ranks[dp_rank]]

    def microbatches(self, dp_rank: int) -> list[dict[str, Tensor]]:
        """The microbatches of one data-parallel rank: new dicts of new tensors."""
        return [
            {name: tensor.clone() for name, tensor in microbatch.items()}
            for microbatch in self.of_ranks[dp_rank]
        ]


def pack_batch(
    batch: GlobalBatch,
    layout: Layout,
    form: str = "cu_seqlens_padded",
    *,
    same_width: bool = True,
) -> PackedBatch:
    """Pack the rows of each microbatch of a global batch, see `pack_rows`.

    Args:
        batch: padded rows with a "loss_mask", assigned to ranks and microbatches.
        layout: tells to which multiple sequences are padded.
        form: one of PACKED_FORMS.
        same_width: pad the microbatches to one width. Otherwise each has a width of its own, which
            a pipeline takes with `variable_seq_lengths` alone.

    Returns:
        The packed batch, for the same ranks and microbatches.
    """
    rows = [batch.microbatches(rank) for rank in range(batch.dp_size)]
    options: dict[str, Any] = {"form": form, "multiple": layout.width_multiple}
    packed = [[pack_rows(microbatch, **options) for microbatch in rank] for rank in rows]
    if same_width:
        width = max(microbatch["loss_mask"].shape[1] for rank in packed for microbatch in rank)
        packed = [[pack_rows(m, width=width, **options) for m in rank] for rank in rows]
    return PackedBatch(tuple(tuple(rank) for rank in packed))


def pack_rows(
    rows: Mapping[str, Tensor],
    *,
    form: str = "cu_seqlens_padded",
    multiple: int = 1,
    width: int | None = None,
) -> dict[str, Tensor]:
    """One packed microbatch from padded rows.

    Each row is cut after its last valid token, which leaves the losses of valid tokens of a causal
    model as they are; a fully masked row keeps one token, so that it is still a sequence. Each is
    padded to a multiple of `multiple`. With the form

    - "cu_seqlens" the padding is a masked part of its sequence;
    - "cu_seqlens_padded" it lies between the sequences, and there is some after each of them:
      "cu_seqlens" has their lengths, "cu_seqlens_padded" where they start.

    The last boundary comes twice, as from loaders that fill up to a fixed number of them.

    Args:
        rows: fields [b, s, ...], which are packed, and [b], which get an entry for the empty last
            sequence; with "loss_mask".
        form: one of PACKED_FORMS.
        multiple: of each padded length; 2C under context parallelism.
        width: t, a multiple of `multiple`; None is what the sequences need.

    Returns:
        fields [1, t, ...] and [b + 1], and the boundaries, int32 [b + 2]. Padding has mask 0, and 1
        in all other fields.

    Raises:
        ValueError: an unknown form, or a width that is too small or no multiple.
    """
    if form not in PACKED_FORMS:
        raise ValueError(f"pack_rows: form must be one of {', '.join(PACKED_FORMS)}, got {form!r}")
    lengths = [int(mask.nonzero().max()) + 1 if mask.any() else 1 for mask in rows["loss_mask"]]
    gap = multiple if form == "cu_seqlens_padded" else 0
    padded = [-(-length // multiple) * multiple + gap for length in lengths]
    if width is not None:
        if width < sum(padded) or width % multiple:
            raise ValueError(
                f"pack_rows: width must be a multiple of {multiple} and at least {sum(padded)}, "
                f"got {width}"
            )
        padded[-1] += width - sum(padded)
    packed = {}
    for name, field in rows.items():
        fill = 0 if name == "loss_mask" else _FILL
        if field.dim() == 1:
            packed[name] = torch.cat([field, field.new_full((1,), fill)])
            continue
        row = field.new_full((1, sum(padded), *field.shape[2:]), fill)
        for sequence, start, length in zip(field, _boundaries(padded), lengths, strict=False):
            row[0, start : start + length] = sequence[:length]
        packed[name] = row
    if form == "cu_seqlens":
        return {**packed, "cu_seqlens": _as_tensor(padded)}
    return {**packed, "cu_seqlens": _as_tensor(lengths), "cu_seqlens_padded": _as_tensor(padded)}


def packed_seq_params(microbatch: Mapping[str, Tensor]) -> Any:
    """Megatron's `PackedSeqParams` of a microbatch; None for padded rows.

    Args:
        microbatch: with "cu_seqlens" and perhaps "cu_seqlens_padded" if it is packed, whole or
            sliced for context parallelism.

    Returns:
        The parameters, or None.
    """
    if "cu_seqlens" not in microbatch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = microbatch["cu_seqlens"]
    padded = microbatch.get("cu_seqlens_padded")
    longest = int((lengths if padded is None else padded).diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _boundaries(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _as_tensor(lengths: list[int]) -> Tensor:
    return torch.tensor([*_boundaries(lengths), sum(lengths)], dtype=torch.int32)
