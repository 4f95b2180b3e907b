"""The data of one optimizer step as one table, and which rows each microbatch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Assignment = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """Rows (sequences) and their assignment.

    Attributes:
        rows: field name -> tensor [num_rows, width, ...]; [num_rows] for a number per sequence.
        assignment: for each data-parallel rank, for each microbatch, the indices of its rows. Every
            row is used exactly once. Ranks may have other numbers of microbatches, at least one,
            and microbatches other numbers of rows.
    """

    rows: Mapping[str, torch.Tensor]
    assignment: Assignment

    def __post_init__(self) -> None:
        """Check that the assignment is a partition of the rows."""
        sizes = {name: tensor.shape[0] for name, tensor in self.rows.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"GlobalBatch: fields must have one number of rows, got {sizes}")
        counts = [len(microbatches) for microbatches in self.assignment]
        if not counts or min(counts) == 0:
            raise ValueError(
                f"GlobalBatch: every data-parallel rank needs a microbatch, got {counts}; one "
                "without sequences gets rows that a sample_mask of 0 takes out"
            )
        used = [row for rank in self.assignment for microbatch in rank for row in microbatch]
        if sorted(used) != list(range(self.num_rows)):
            raise ValueError(
                f"GlobalBatch: assignment must use each of the rows 0..{self.num_rows - 1} once, "
                f"got {sorted(used)}"
            )

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return next(iter(self.rows.values())).shape[0]

    @property
    def width(self) -> int:
        """Padded length of a sequence."""
        return next(t.shape[1] for t in self.rows.values() if t.dim() > 1)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks that the assignment is for."""
        return len(self.assignment)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the data-parallel rank that has most."""
        return max(map(len, self.assignment))

    @property
    def longest_sequence(self) -> int:
        """Positions that a model needs: the width."""
        return self.width

    def shapes(self, dp_rank: int) -> list[tuple[int, int]]:
        """(rows, width) of each microbatch of a data-parallel rank."""
        return [(len(rows), self.width) for rows in self.assignment[dp_rank]]

    def split(self, dp: int, num_microbatches: int) -> GlobalBatch:
        """The same rows, spread evenly and in order.

        Args:
            dp: number of data-parallel ranks.
            num_microbatches: microbatches per rank; dp * num_microbatches must divide the rows.

        Returns:
            A batch of the same tensors.
        """
        return GlobalBatch(self.rows, _even_assignment(self.num_rows, dp, num_microbatches))

    def microbatches(self, dp_rank: int) -> list[dict[str, torch.Tensor]]:
        """Full-width microbatches of one data-parallel rank: new dicts of new tensors.

        Args:
            dp_rank: which rank.

        Returns:
            one dict per microbatch, of tensors [rows of the microbatch, width, ...].
        """
        return [
            {name: tensor[list(indices)] for name, tensor in self.rows.items()}
            for indices in self.assignment[dp_rank]
        ]


def ragged_batch(
    num_rows: int = 16,
    *,
    dp: int = 1,
    num_microbatches: int = 1,
    assignment: Sequence[Sequence[Sequence[int]]] | None = None,
    width: int = 16,
    vocab_size: int = 32,
    extra_fields: Sequence[str] = (),
    seed: int = 0,
) -> GlobalBatch:
    """A batch with what aggregation code gets wrong, the same for the same arguments.

    Prompts and responses of random lengths, padding, holes in a mask, one fully masked sequence
    (if there is another one), the last microbatch of the last rank fully masked (unless it is the
    only one), and a different number of valid tokens on each data-parallel rank. `split` gives the
    same rows to another layout.

    Args:
        num_rows: number of sequences.
        dp: data-parallel ranks of the assignment for which the above holds.
        num_microbatches: microbatches per rank of that assignment.
        assignment: instead of an even one, see `GlobalBatch`; `dp` and `num_microbatches` are then
            read from it.
        width: padded length; a multiple of 2C for context parallelism.
        vocab_size: of the model.
        extra_fields: names of more float64 fields. Those that end in "log_probs" are near
            -log(vocab_size), others standard normal.
        seed: of all random numbers.

    Returns:
        rows with tokens, labels and position_ids (int64), loss_mask (float32, 0 or 1, aligned with
        the labels) and the extra fields (float64), all [num_rows, width].
    """
    if assignment is None:
        fixed = _even_assignment(num_rows, dp, num_microbatches)
    else:
        fixed = tuple(tuple(tuple(rows) for rows in rank) for rank in assignment)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (num_rows, width + 1), generator=generator)
    rows = {
        "tokens": tokens[:, :-1].clone(),
        "labels": tokens[:, 1:].clone(),
        "position_ids": torch.arange(width).repeat(num_rows, 1),
        "loss_mask": _nasty_mask(num_rows, width, fixed, generator),
    }
    for name in extra_fields:
        noise = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
        near_uniform = 0.3 * noise - torch.log(torch.tensor(float(vocab_size), dtype=torch.float64))
        rows[name] = near_uniform if name.endswith("log_probs") else noise
    return GlobalBatch(rows, fixed)


def _even_assignment(num_rows: int, dp: int, num_microbatches: int) -> Assignment:
    size, rest = divmod(num_rows, dp * num_microbatches)
    if rest or not size:
        raise ValueError(
            f"GlobalBatch: dp * num_microbatches = {dp} * {num_microbatches} must divide the "
            f"{num_rows} rows; pass an assignment for an uneven split"
        )
    return tuple(
        tuple(
            tuple(range(first, first + size))
            for first in range(
                rank * num_microbatches * size, (rank + 1) * num_microbatches * size, size
            )
        )
        for rank in range(dp)
    )


def _nasty_mask(
    num_rows: int, width: int, assignment: Assignment, generator: torch.Generator
) -> torch.Tensor:
    mask = torch.zeros(num_rows, width)
    for row in range(num_rows):
        prompt = int(torch.randint(1, width // 4 + 1, (), generator=generator))
        response = int(torch.randint(1, width - prompt + 1, (), generator=generator))
        mask[row, prompt - 1 : prompt - 1 + response] = 1
        if row % 3 == 0 and response > 2:
            mask[row, prompt] = 0  # such as a tool's output inside the response
    last_microbatch = assignment[-1][-1]
    others = list(range(num_rows))
    if len(assignment) * len(assignment[0]) > 1:
        mask[list(last_microbatch)] = 0
        others = [row for row in others if row not in last_microbatch]
    if len(others) > 1:
        mask[others[len(others) // 2]] = 0
    _make_counts_differ(mask, assignment)
    return mask


def _make_counts_differ(mask: torch.Tensor, assignment: Assignment) -> None:
    """Drop tokens until no two data-parallel ranks have the same number of them."""
    seen: set[int] = set()
    for rank in assignment:
        rows = [row for microbatch in rank for row in microbatch]
        while (count := int(mask[rows].sum())) in seen and count > 0:
            longest = max(rows, key=lambda row: int(mask[row].sum()))
            mask[longest, int(mask[longest].nonzero()[0])] = 0
        seen.add(count)
