"""How far a reader walks to follow one step: the calls of Python functions of this package.

    python tools/step_path.py           # two lines of four numbers
    python tools/step_path.py --list    # and the files, in the order of the first visit

One process, one term, one microbatch. "a step" is `begin_step`, the iterator's `next`, `loss_func`,
`validate` and `report`; "first next of wrap" is what the schedule's first `next` runs. Counted is
the second step, as what is cached is no part of the path. Comprehensions are no calls of their own:
whether Python makes them one depends on its version.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch

import megatron_lossagg
from megatron_lossagg import LossAggregator, ParallelGroups

PACKAGE = Path(megatron_lossagg.__file__).parent
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@contextmanager
def recorded(calls: list[CodeType]) -> Iterator[None]:
    """Append the function of every call of this package's Python code."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in _COMPREHENSIONS:
            if Path(code.co_filename).is_relative_to(PACKAGE):
                calls.append(code)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def make_aggregator(**model_config: Any) -> LossAggregator:
    """One term, token-mean, in one process."""
    return LossAggregator(
        lambda output_tensor, microbatch: output_tensor,
        loss_agg_mode="token-mean",
        model_config=SimpleNamespace(calculate_per_token_loss=False, **model_config),
        groups=ParallelGroups.single_process(),
    )


def make_microbatch() -> dict[str, torch.Tensor]:
    """One row of two valid tokens and one that is masked."""
    return {"loss_mask": torch.tensor([[1, 0, 1]])}


def a_step() -> list[CodeType]:
    """The calls from begin_step to report."""
    calls: list[CodeType] = []
    aggregator, microbatch = make_aggregator(), make_microbatch()
    token_losses = torch.ones(1, 3, requires_grad=True)
    with recorded(calls):
        step = aggregator.begin_step([microbatch])
        iterator = step.data_iterator(1)[0]
        assert iterator is not None
        planned = next(iterator)
        _, report = step.loss_func(planned, token_losses)
        step.validate()
        step.report([report])
    return calls


def first_next_of_wrap() -> list[CodeType]:
    """The calls of the first `next` of a wrapped iterator."""
    calls: list[CodeType] = []
    aggregator = make_aggregator(finalize_model_grads_func=lambda *args, **kwargs: None)
    iterator = aggregator.wrap(iter([make_microbatch()]), num_microbatches=1)
    assert isinstance(iterator, Iterator)
    with recorded(calls):
        next(iterator)
    return calls


def file_of(code: CodeType) -> str:
    """The path of a function's file inside the package."""
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


def numbers(calls: list[CodeType]) -> tuple[int, int, int, int]:
    """(calls, distinct functions, distinct files, changes from one file to another)."""
    files = [file_of(code) for code in calls]
    changes = sum(one != other for one, other in zip(files, files[1:], strict=False))
    return len(calls), len(set(calls)), len(set(files)), changes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the files with their calls")
    arguments = parser.parse_args()
    paths: dict[str, Callable[[], list[CodeType]]] = {
        "a step": a_step,
        "first next of wrap": first_next_of_wrap,
    }
    print(f"{'':20}{'calls':>10}{'functions':>10}{'files':>10}{'changes':>10}")
    for name, walk in paths.items():
        walk()  # fills what is cached
        calls = walk()
        print(f"{name:20}" + "".join(f"{number:10}" for number in numbers(calls)))
        if arguments.list:
            for file, num_calls in Counter(map(file_of, calls)).items():
                print(f"{num_calls:30}  {file}")


if __name__ == "__main__":
    main()
