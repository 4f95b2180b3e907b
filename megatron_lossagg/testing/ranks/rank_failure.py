"""What a `RankPool` raises: which rank failed first, for what reason, and where the others were."""

from __future__ import annotations

import contextlib
import pickle

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.ranks.rank_worker import RankError


class RankFailure(LossAggError):
    """A rank raised, died or did not answer in time.

    Args:
        message: of the exception.
        rank: the rank that failed first for a reason of its own; an attribute, too.
        failures: rank -> full traceback, or the stack at which a rank without answer was; an
            attribute, too.
    """

    def __init__(self, message: str, rank: int = -1, failures: dict[int, str] | None = None):
        super().__init__(message)
        self.rank = rank
        self.failures = failures or {}


def failure_of_call(
    name: str, world_size: int, errors: dict[int, RankError], stacks: dict[int, str]
) -> RankFailure:
    """The failure of a call that raised on some ranks.

    Args:
        name: of the function.
        world_size: number of ranks that took part.
        errors: rank -> what it raised; at least one. The cause is the first that is no echo of
            another rank's failure.
        stacks: rank -> where it was, of the ranks that gave no answer.

    Returns:
        The exception, to be raised.
    """
    root = min(errors, key=lambda rank: (errors[rank].is_echo, errors[rank].seconds))
    alike = [rank for rank in sorted(errors) if errors[rank].summary == errors[root].summary]
    root = alike[0]
    lines = [f"rank {root} of {world_size} failed in {name}: {errors[root].summary}"]
    if len(alike) > 1:
        lines.append(f"ranks {alike[1:]} failed alike")
    for rank in sorted(errors.keys() - set(alike)):
        lines.append(f"rank {rank} failed too: {(errors[rank].summary.splitlines() or [''])[0]}")
    lines += [f"rank {rank} had not finished and was ended" for rank in sorted(stacks)]
    lines.append(f"\n--- rank {root} ---\n{errors[root].trace}")
    texts = {rank: error.trace for rank, error in errors.items()} | stacks
    failure = RankFailure("\n".join(lines), root, texts)
    if errors[root].pickled_exception:
        with contextlib.suppress(Exception):
            failure.__cause__ = pickle.loads(errors[root].pickled_exception)
    return failure


def hang_of_call(
    name: str, limit_s: float, stacks: dict[int, str], finished: list[int]
) -> RankFailure:
    """The failure of a call that some ranks have not answered in time.

    Args:
        name: of the function.
        limit_s: seconds it had.
        stacks: rank -> where it was, of the ranks without answer; at least one.
        finished: the ranks that had answered.

    Returns:
        The exception, to be raised.
    """
    hung = sorted(stacks)
    parts = [
        f"{name} did not finish within {limit_s:g} s: ranks {hung} were still running, ranks "
        f"{finished} had finished. All were ended. If the work is that long, pass timeout_s; else "
        "look for a collective or a receive that not every rank enters:"
    ]
    parts += [f"--- rank {rank} was here ---\n{stacks[rank]}" for rank in hung]
    return RankFailure("\n".join(parts), hung[0], stacks)
