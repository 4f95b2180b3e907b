"""Counts of the global batch: integers, summed once per step over the data-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.counts.agreement import describe_differences
from megatron_lossagg.counts.global_counts import GlobalCounts
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.counts.units import LocalUnits
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.groups import ParallelGroups, all_reduce_sum, communication_device

# Layout of the vector that is reduced: 8 header entries, 2 entries per mask slot (tokens, valid
# sequences), and last the sequences, which are the same for all masks. Its length never depends on
# the configuration, so that ranks which were configured differently still run the same collective
# and can find out. 32 int64 are 256 bytes.
_RANKS, _FINGERPRINT, _FINGERPRINT_SQUARED, _MICROBATCHES = range(4)
_BAD_MASK_VALUES, _BAD_UNIT_IDS, _POSITIONS = 4, 5, 6
_HEADER = 8
NUM_MASK_SLOTS = 11
VECTOR_LENGTH = 32
_SEQUENCES = VECTOR_LENGTH - 1
NUM_HELD = VECTOR_LENGTH - _HEADER
# fingerprint^2 summed over 2^14 ranks must stay below 2^63.
FINGERPRINT_BITS = 24


@dataclass(frozen=True)
class LocalCounts:
    """What this rank's microbatches hold: kept so that masks are read once.

    Attributes:
        sequences: for each distinct mask, those of all microbatches.
        units: for each distinct mask their units, None where no mode counts them.
        vector: the packed int64 [VECTOR_LENGTH] contribution of this rank.
    """

    sequences: list[Sequences]
    units: list[LocalUnits | None]
    vector: Tensor

    @property
    def held(self) -> Tensor:
        """Tokens and valid sequences of each mask, and last sequences, int64 [NUM_HELD]."""
        return self.vector[_HEADER:]


def count_local(
    sequences: list[Sequences],
    units: list[LocalUnits | None] | None = None,
    fingerprint: int = 0,
) -> LocalCounts:
    """Count this rank's sequences, given for each distinct mask. Does not communicate."""
    assert len(sequences) <= NUM_MASK_SLOTS  # checked when masks were chosen
    units = [None] * len(sequences) if units is None else units
    main = sequences[0]
    known = [0] * VECTOR_LENGTH
    known[_RANKS] = 1
    known[_FINGERPRINT] = fingerprint
    known[_FINGERPRINT_SQUARED] = fingerprint**2
    known[_MICROBATCHES] = len(main.masks)
    known[_POSITIONS] = sum(mask.numel() for mask in main.masks)
    vector = torch.tensor(known).to(main.num_tokens.device, non_blocking=True)
    vector[_SEQUENCES] = main.num_seqs
    for slot, of_mask in enumerate(sequences):
        start = _HEADER + 2 * slot
        num_tokens = of_mask.num_tokens
        vector[start : start + 2] = torch.stack((num_tokens.sum(), (num_tokens > 0).sum()))
        vector[_BAD_MASK_VALUES] += of_mask.num_bad_values
    for of_units in units:
        if of_units is not None:
            vector[_BAD_UNIT_IDS] += of_units.num_bad_ids
    return LocalCounts(sequences, units, vector)


def sum_local(vectors: Sequence[Tensor], fingerprint: int) -> Tensor:
    """One rank's contribution from those of its microbatches. Does not communicate."""
    total = torch.stack(list(vectors)).sum(dim=0)
    total[_RANKS] = 1
    total[_FINGERPRINT] = fingerprint
    total[_FINGERPRINT_SQUARED] = fingerprint**2
    return total


class PendingCounts:
    """Counts whose all-reduce may still be running.

    Args:
        vector: int64 [VECTOR_LENGTH], being summed.
        group: over which; None where this rank cannot ask the others.
        unit_counts: by mask slot int64 [2, U], being summed.
        works: what is under way.
    """

    def __init__(
        self,
        vector: Tensor,
        group: Any = None,
        unit_counts: Mapping[int, Tensor] | None = None,
        works: Sequence[Any] = (),
    ) -> None:
        self._vector = vector
        self._group = group
        self._unit_counts = unit_counts or {}
        self._works = list(works)

    def wait(self, slot: int = 0) -> GlobalCounts:
        """The counts of a mask. Under NCCL this orders streams and does not block the host."""
        for work in self._works:
            work.wait()
        self._works = []
        start = _HEADER + 2 * slot
        num_tokens, num_valid_seqs = self._vector[start : start + 2].unbind()
        of_units = self._unit_counts.get(slot)
        units = () if of_units is None else of_units.unbind()
        return GlobalCounts(num_tokens, num_valid_seqs, self._vector[_SEQUENCES], *units)

    @property
    def num_positions(self) -> Tensor:
        """Positions of the main masks, valid or not, int64 []."""
        self.wait()
        return self._vector[_POSITIONS]

    @property
    def num_ranks(self) -> int:
        """How many ranks brought counts. Waits for the device."""
        self.wait()
        return int(self._vector[_RANKS])

    def check(self, identity: Callable[[], Mapping[str, str]] | None = None) -> None:
        """Raise LossAggError if ranks were configured differently or a mask held other values.

        Reads the vector on the host, so it waits for the device. Only where fingerprints differ,
        which every rank of the group then knows: an all-gather of `identity` over that group.

        Args:
            identity: gives the options of this rank, of which its fingerprint was made.

        Raises:
            LossAggError: on every rank of the group.
        """
        self.wait()
        header = self._vector[:_HEADER].tolist()
        if header[_FINGERPRINT_SQUARED] * header[_RANKS] != header[_FINGERPRINT] ** 2:
            how = "tensor-parallel rank 0 says in what"
            if identity is not None and self._group is not None:
                how = describe_differences(identity(), self._group)
            raise LossAggError(
                f"The data-parallel ranks were configured differently: {how}. Their weights would "
                "not belong to one objective. Build LossAggregator with the same arguments on "
                "every rank, and begin the same step on all of them."
            )
        if header[_BAD_UNIT_IDS] > 0:
            raise LossAggError(
                f"{header[_BAD_UNIT_IDS]} unit_ids of the global batch are outside 0..num_units-1. "
                "Units are numbered densely over all ranks: 0 to num_units - 1."
            )
        if header[_BAD_MASK_VALUES] > 0:
            raise LossAggError(
                f"{header[_BAD_MASK_VALUES]} mask values in the global batch are neither 0 nor 1, "
                "or 1 outside every sequence of cu_seqlens. Put per-token weights into the loss, "
                "not into the mask: the mask is what is counted."
            )


def start_reduction(local: LocalCounts, groups: ParallelGroups) -> PendingCounts:
    """Start the all-reduce of a rank's counts over the data-parallel group (dp, without cp)."""
    device = communication_device(groups.dp, local.vector.device)
    vector = local.vector.to(device, copy=True)  # the local counts stay what they are
    works = [all_reduce_sum(vector, groups.dp, async_op=True)]
    units = {slot: u.counts for slot, u in enumerate(local.units) if u is not None}
    unit_counts = {}
    if units:
        stacked = torch.stack(list(units.values())).to(device)
        works.append(all_reduce_sum(stacked, groups.dp, async_op=True))
        unit_counts = dict(zip(units, stacked.unbind(), strict=True))
    under_way = [work for work in works if work is not None]
    return PendingCounts(vector, groups.dp, unit_counts, under_way)


def held_place(name: str, slot: int) -> int:
    """Where `LocalCounts.held` has a count of a mask."""
    places = {"num_tokens": 2 * slot, "num_valid_seqs": 2 * slot + 1, "num_seqs": NUM_HELD - 1}
    return places[name]


def held_counts(held: Sequence[float], slot: int) -> dict[str, int]:
    """num_tokens, num_valid_seqs and num_seqs of a mask, from the numbers of `LocalCounts.held`."""
    names = ("num_tokens", "num_valid_seqs", "num_seqs")
    return {name: int(held[held_place(name, slot)]) for name in names}


def check_given_counts(
    counts: GlobalCounts, local: LocalCounts, slot: int = 0, mask_key: str = "loss_mask"
) -> None:
    """Raise LossAggError if a caller's counts are below this rank's own. Waits for the device."""
    for name, held in held_counts(local.held.tolist(), slot).items():
        given = int(getattr(counts, name))
        if given < held:
            raise LossAggError(
                f"counts says {name}={given}, but this rank's microbatches alone hold {held} "
                f"under {mask_key!r}. Pass the counts of the whole global batch (all ranks and "
                "microbatches of the step), or leave counts out."
            )


def count_global_batch(
    loss_masks: Sequence[Tensor],
    groups: ParallelGroups,
    *,
    sample_masks: Sequence[Tensor | None] | None = None,
    cu_seqlens: Sequence[Tensor | None] | None = None,
    cu_seqlens_padded: Sequence[Tensor | None] | None = None,
    unit_ids: Sequence[Tensor] | None = None,
    num_units: int | None = None,
) -> GlobalCounts:
    """Count the global batch: one all-reduce over the data-parallel group (dp, without cp).

    T = sum of the masks, B = sequences, over all ranks and microbatches. One int64 vector of 256
    bytes is reduced, whatever the number of microbatches; with units one more of 16 * num_units
    bytes. Every rank of the group must call it.

    Args:
        loss_masks: this rank's masks, one [b, s] (or [1, t] with `cu_seqlens`) per microbatch, at
            full length (before context-parallel slicing), values 0 and 1.
        groups: whose `dp` group holds the ranks with different data;
            `ParallelGroups.from_megatron()` or `ParallelGroups.single_process()`.
        sample_masks: per microbatch a [b] tensor whose 0 marks a row that only pads the batch, or
            None.
        cu_seqlens: per microbatch the boundaries of its packed sequences, or None.
        cu_seqlens_padded: per microbatch where its padded sequences start, or None.
        unit_ids: per microbatch the unit of each sequence, an integer in 0..num_units-1.
        num_units: U, the units of the whole global batch.

    Returns:
        GlobalCounts, summed over ranks and microbatches.

    Raises:
        ValueError: no masks, a wrong shape or other values than 0 and 1.
        LossAggError: a mask on a GPU held other values than 0 and 1.
    """
    if not isinstance(loss_masks, Sequence) or not loss_masks:
        size = "empty " if isinstance(loss_masks, Sequence) else ""
        raise ValueError(
            "Expected a non-empty list of loss masks [b, s], one per microbatch; got: "
            f"{size}{type(loss_masks).__name__}."
        )
    per_microbatch = {
        "loss_masks": loss_masks,
        "sample_masks": sample_masks,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded,
    }
    columns = []
    for name, values in per_microbatch.items():
        values = [None] * len(loss_masks) if values is None else values
        if len(values) != len(loss_masks):
            raise ValueError(
                f"Got {len(values)} {name} for {len(loss_masks)} loss masks; pass one per "
                "microbatch (or None for it)."
            )
        columns.append(values)
    sequences = Sequences.of_fields(list(zip(*columns, strict=True)))
    units = None
    if unit_ids is not None:
        units = LocalUnits.of(sequences, unit_ids, num_units)
    pending = start_reduction(count_local([sequences], [units]), groups)
    pending.check()
    return pending.wait()
