"""`begin_step`: counting, building weights, and the wait for the counts of other ranks.

python benchmarks/begin_step.py --write
python benchmarks/begin_step.py --microbatches 8 --rounds 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from common import (
    alternate,
    keep_freed_memory,
    machine,
    markdown_table,
    milliseconds,
    publish,
    ratio_text,
)
from torch import Tensor

from megatron_lossagg import LossAggregator, LossTerm, ParallelGroups
from megatron_lossagg.counts.masks import count_rows
from megatron_lossagg.testing import RankPool
from megatron_lossagg.testing.ranks.parallel import current_device
from megatron_lossagg.weights.plan import WeightPlan

TARGET = 2.0


def make_aggregator(num_masks: int = 1, groups: ParallelGroups | None = None) -> LossAggregator:
    modes = ("seq-mean-token-mean", "token-mean")
    terms = [
        LossTerm(f"term {i}", lambda output, microbatch: output, modes[i % 2], mask_key=mask_key(i))
        for i in range(num_masks)
    ]
    return LossAggregator(
        terms=terms,
        model_config=SimpleNamespace(calculate_per_token_loss=False),
        groups=ParallelGroups.single_process() if groups is None else groups,
    )


def mask_key(index: int) -> str:
    return "loss_mask" if index == 0 else f"mask_{index}"


def make_masks(number: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    device = current_device()
    return [(torch.rand(*shape, device=device) < 0.7).to(dtype) for _ in range(number)]


def counting(arguments: argparse.Namespace) -> list[list[str]]:
    """begin_step of one process, against a sum of every mask."""
    rows = []
    for dtype in (torch.float32, torch.bool, torch.int64):
        masks = make_masks(arguments.microbatches, arguments.shape, dtype)
        microbatches = [{"loss_mask": mask} for mask in masks]
        aggregator = make_aggregator()
        name = str(dtype).removeprefix("torch.")
        candidates: dict[str, Callable[[], object]] = {
            "sum": lambda masks=masks: [mask.sum() for mask in masks],
            "rows": lambda masks=masks: [mask.sum(dim=1) for mask in masks],
            "checked": lambda masks=masks: count_rows(masks),
            "begin_step": lambda m=microbatches, a=aggregator: a.begin_step(m),
        }
        seconds = alternate(candidates, rounds=arguments.rounds, warmup=5)
        base = seconds["sum"]
        texts = [
            ("every mask summed once", "sum", ""),
            ("sums of the rows, nothing checked", "rows", ""),
            ("sums of the rows, values checked", "checked", ""),
            ("`begin_step`", "begin_step", f"at most {TARGET:.0f}"),
        ]
        rows += [
            [
                f"{name}: {text}",
                f"{milliseconds(seconds[key])} ms",
                ratio_text(seconds[key], base),
                t,
            ]
            for text, key, t in texts
        ]
    return rows


def building_weights(arguments: argparse.Namespace) -> list[list[str]]:
    """All weights of a step, against as many multiplications of tensors of that shape."""
    rows = []
    for dtype in (torch.float32, torch.bool):
        masks = make_masks(arguments.microbatches, arguments.shape, dtype)
        left, right = make_masks(2, arguments.shape, torch.float32)
        plans: list[WeightPlan] = []
        aggregator = make_aggregator()

        def begin(
            plans: list[WeightPlan] = plans,
            masks: list[Tensor] = masks,
            aggregator: LossAggregator = aggregator,
        ) -> None:
            plans[:] = [aggregator.begin_step([{"loss_mask": mask} for mask in masks]).plan]

        def build(plans: list[WeightPlan] = plans) -> list[object]:
            return [plans[0].weights(index) for index in range(arguments.microbatches)]

        def multiply(left: Tensor = left, right: Tensor = right) -> list[Tensor]:
            return [left * right for _ in range(arguments.microbatches)]

        seconds = alternate(
            {"multiply": multiply, "weights": build},
            rounds=arguments.rounds,
            warmup=5,
            prepare=begin,
        )
        name, base = str(dtype).removeprefix("torch."), seconds["multiply"]
        for text, key, target in (
            (f"{name}: multiplications", "multiply", ""),
            (f"{name}: weights", "weights", f"at most {TARGET:.0f}"),
        ):
            found = ratio_text(seconds[key], base) if target else "1"
            rows.append([text, f"{milliseconds(seconds[key])} ms", found, target])
    return rows


def collectives_of(num_masks: int, num_microbatches: int) -> tuple[int, int]:
    """(number, bytes) of what begin_step and the first weights reduce, on this rank."""
    groups = ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    aggregator = make_aggregator(num_masks, groups)
    microbatches = [
        {mask_key(i): torch.ones(4, 64) for i in range(num_masks)} for _ in range(num_microbatches)
    ]
    sent, original = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> object:
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        _ = aggregator.begin_step(microbatches).microbatches
    return len(sent), sum(sent)


def waits_of_counts(num_rounds: int, forward_size: int) -> dict[str, list[float]]:
    """Seconds in the wait for the all-reduce, at once and after a forward pass, and how it was."""
    groups = ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    aggregator = make_aggregator(groups=groups)
    microbatches = [{"loss_mask": torch.ones(4, 1024)} for _ in range(8)]
    hidden = torch.randn(forward_size, forward_size)
    found: dict[str, list[float]] = {"forward": []}
    works, original = [], dist.all_reduce

    def all_reduce(*args: object, **kwargs: object) -> object:
        works.append(original(*args, **kwargs))
        return works[-1]

    for _ in range(num_rounds):
        for kind in ("at once", "after"):
            dist.barrier()
            with mock.patch.object(dist, "all_reduce", all_reduce):
                aggregator.begin_step(microbatches)
            work = works.pop()
            start = time.perf_counter()
            if kind == "after":
                for _ in range(4):
                    torch.tanh(hidden @ hidden)
                found["forward"].append(time.perf_counter() - start)
            found.setdefault(f"{kind}: ended", []).append(float(work.is_completed()))
            start = time.perf_counter()
            work.wait()
            found.setdefault(f"{kind}: wait", []).append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--shape", type=int, nargs=2, default=[4, 8192])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--forward-size", type=int, default=768)
    parser.add_argument("--no-ranks", action="store_true", help="without what needs two ranks")
    parser.add_argument("--write", action="store_true", help="replace the section in README.md")
    arguments = parser.parse_args()
    keep_freed_memory()
    header = ["", "median", "ratio (95 % interval)", "target"]
    counted = markdown_table(header, counting(arguments))
    built = markdown_table(header, building_weights(arguments))
    if arguments.no_ranks:
        print(f"{machine()}\n\n{counted}\n\n{built}")
        return
    cases = [(masks, m) for masks in (1, 8) for m in (1, 64)]
    with RankPool(2) as pool:
        sent = [[masks, m, *pool.run(collectives_of, masks, m)[0]] for masks, m in cases]
        waits = pool.run(waits_of_counts, arguments.rounds, arguments.forward_size)
    both = {name: [value for rank in waits for value in rank[name]] for name in waits[0]}
    median_us = {name: 1e6 * statistics.median(values) for name, values in both.items()}
    publish(
        "begin_step",
        "begin_step",
        f"{arguments.microbatches} microbatches of {arguments.shape} in one process, "
        f"{arguments.rounds} rounds, the candidates in another order in each; a ratio is to the "
        f"first line of its dtype. {machine()}.\n\n"
        f"{counted}\n\n"
        "A mask is what is counted, so its values are checked: one that holds a weight raises. "
        "Bool masks have nothing to check. int64 is right if it lies between 0 and 1, one more "
        "reduction, as long as the sums. For all other masks the check is a copy, another pass "
        "over it and a reduction. That is what the third line has over the second: a reduction or "
        "two more than a sum is all that the target leaves, so it is out of reach for floats, and "
        "missed by a little for int64, while a wrong mask raises where it is passed, before the "
        "step runs. What `begin_step` has over the third line is Python, some 0.2 ms a step and "
        "5 us a microbatch.\n\n"
        f"{built}\n\n"
        "What is communicated, on two gloo ranks, with the first weights built:\n\n"
        + markdown_table(["masks", "microbatches", "collectives", "bytes"], sent)
        + "\n\nThe all-reduce runs while the caller goes on. On two gloo ranks of one thread it "
        f"had ended in {statistics.mean(both['after: ended']):.0%} of the steps after a forward "
        f"pass of {1e-3 * median_us['forward']:.0f} ms, and waiting for it then took "
        f"{median_us['after: wait']:.0f} us; right after `begin_step` it had ended in "
        f"{statistics.mean(both['at once: ended']):.0%} and took {median_us['at once: wait']:.0f} "
        "us (medians). For a schedule's own first use see *A schedule step*.",
        write=arguments.write,
    )


if __name__ == "__main__":
    main()
