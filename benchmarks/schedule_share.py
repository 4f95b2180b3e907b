"""The plugin's share of a schedule step, against a loss of two lines.

python benchmarks/schedule_share.py --write                # PP=2, D=2, M=8 on four gloo ranks
python benchmarks/schedule_share.py --sets 1 --hidden 64
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import (
    keep_freed_memory,
    machine,
    markdown_table,
    milliseconds,
    publish,
    ratio,
    ratio_interval,
    ratio_text,
)
from torch import Tensor

from megatron_lossagg import LossAggregator
from megatron_lossagg.counts import PendingCounts
from megatron_lossagg.testing import Layout, RankPool, TinyGPT, build_model_chunks, token_log_probs
from megatron_lossagg.testing.model.model_chunks import set_config_hooks
from megatron_lossagg.testing.model.parameter_names import unwrap

LAYOUT = Layout(pp=2, dp=2, num_microbatches=8)
HAND, CONTROL = "two lines", "two lines once more"
PLUGIN, CHECKED = "plugin", "plugin, validate and report"
AHEAD = "plugin, begun a step ahead"
KINDS = (CONTROL, PLUGIN, AHEAD, CHECKED)
TARGET = 1.03


@dataclass(frozen=True)
class Shape:
    """Of a microbatch and of the model."""

    rows: int
    width: int
    hidden: int
    vocab: int

    def gpt(self) -> TinyGPT:
        return TinyGPT(
            num_layers=4,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_sequence_length=self.width,
            dtype=torch.float32,
            init_std=0.02,
        )

    def microbatches(self, dp_rank: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(dp_rank)
        size = (self.rows, self.width)
        return [
            {
                "tokens": torch.randint(self.vocab, size, generator=generator),
                "labels": torch.randint(self.vocab, size, generator=generator),
                "position_ids": torch.arange(self.width).repeat(self.rows, 1),
                "loss_mask": (torch.rand(size, generator=generator) < 0.7).float(),
            }
            for _ in range(LAYOUT.num_microbatches)
        ]


def token_losses(logits: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
    return -token_log_probs(logits, microbatch["labels"])


def hand_written(num_tokens: float, microbatch: dict[str, Tensor], logits: Tensor) -> Any:
    """Two lines; the factor undoes what the schedule and DDP divide by."""
    loss = (token_losses(logits, microbatch) * microbatch["loss_mask"]).sum() / num_tokens
    return loss * LAYOUT.num_microbatches * LAYOUT.dp, {"loss": loss.detach().clone()}


@dataclass(frozen=True)
class Timed:
    """Seconds of a step, of it until all ranks are done, and of its own loss and plugin.

    The last is processor time of the rank's own thread.
    """

    step: float
    until_all: float
    inside: float


@dataclass(frozen=True)
class Times:
    """What a rank measured, by kind; waits for the counts of each step."""

    is_last_stage: bool
    pairs: dict[str, list[tuple[Timed, Timed]]]
    waits: dict[str, list[float]]
    has_ended: dict[str, list[bool]]


class Stopwatch:
    """Adds up the thread's processor time inside what it is put around.

    There torch is called as on a GPU: what lets Megatron-Core run on a CPU would answer each of the
    many small calls of a loss in Python first.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                with torch._C.DisableTorchFunction():
                    return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return timed

    def around_iterator(self, iterator: Any) -> Iterator[Any]:
        take = self.around(partial(next, iterator, None))
        while (item := take()) is not None:
            yield item


def time_steps(shape: Shape, num_rounds: int) -> Times:
    """Every kind of step in every round, and how long a step's first use of the counts waited."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = build_model_chunks(shape.gpt(), LAYOUT)
    microbatches = shape.microbatches(parallel_state.get_data_parallel_rank())
    aggregator = LossAggregator(
        token_losses, loss_agg_mode="token-mean", model_config=unwrap(chunks[0]).config
    )
    num_tokens = sum(m["loss_mask"].sum() for m in microbatches)
    dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())

    def run(data_iterator: Any, loss_func: Any) -> list[Any]:
        def forward_step(iterator: Any, model: Any) -> Any:
            microbatch = next(iterator)
            output = model(microbatch["tokens"], microbatch["position_ids"], None)
            return output, partial(loss_func, microbatch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=chunks,
            num_microbatches=LAYOUT.num_microbatches,
            seq_length=shape.width,
            micro_batch_size=shape.rows,
            forward_only=False,
        )

    stopwatch = Stopwatch()
    begun = [aggregator.begin_step(microbatches)]

    def step_of(kind: str) -> None:
        if kind in (HAND, CONTROL):
            by_hand = stopwatch.around(hand_written)
            run([iter(microbatches)], partial(by_hand, float(num_tokens)))
            return
        step = stopwatch.around(aggregator.begin_step)(microbatches)
        if kind == AHEAD:
            begun.append(step)
            step = begun.pop(0)
        iterators = [stopwatch.around_iterator(iterator) for iterator in step.data_iterator()]
        store = run(iterators, stopwatch.around(step.loss_func))
        if kind == CHECKED:
            stopwatch.around(step.validate)()
            stopwatch.around(step.report)(store)

    waits: dict[str, list[float]] = defaultdict(list)
    has_ended: dict[str, list[bool]] = defaultdict(list)
    original_wait = PendingCounts.wait

    def timed_wait(self: PendingCounts, slot: int = 0) -> Any:
        start = time.perf_counter()
        for work in self._works:
            has_ended[current[0]].append(work.is_completed())
            work.wait()
            waits[current[0]].append(time.perf_counter() - start)
        return original_wait(self, slot)

    def timed_step(kind: str) -> Timed:
        current[0] = kind
        set_config_hooks(chunks)
        chunks[0].zero_grad_buffer()
        dist.barrier()
        stopwatch.seconds = 0.0
        start = time.perf_counter()
        with mock.patch.object(PendingCounts, "wait", timed_wait):
            step_of(kind)
        returned = time.perf_counter() - start
        dist.barrier()
        return Timed(returned, time.perf_counter() - start, stopwatch.seconds)

    keep_freed_memory()
    kinds, current, rng = list(KINDS), [HAND], random.Random(0)
    pairs: dict[str, list[tuple[Timed, Timed]]] = {kind: [] for kind in KINDS}
    for index in range(num_rounds + 2):
        rng.shuffle(kinds)
        for kind in kinds:
            order = [kind, HAND]
            rng.shuffle(order)
            timed = {name: timed_step(name) for name in order}
            if index >= 2:
                pairs[kind].append((timed[kind], timed[HAND]))
    return Times(parallel_state.is_pipeline_last_stage(), pairs, waits, has_ended)


def column(of_ranks: list[Times], kind: str, field: str) -> tuple[list[float], list[float]]:
    """One number of every step of a kind, and of the hand-written one beside each."""
    pairs = [pair for times in of_ranks for pair in times.pairs[kind]]
    return [getattr(own, field) for own, _ in pairs], [getattr(hand, field) for _, hand in pairs]


def waiting(results: list[Times], kind: str, *, last: bool) -> str:
    """How long the ranks of one stage waited, and how often there was nothing to wait for."""
    of_stage = [times for times in results if times.is_last_stage is last]
    seconds = [s for times in of_stage for s in times.waits[kind]]
    ended = [e for times in of_stage for e in times.has_ended[kind]]
    return (
        f"{1e6 * statistics.median(seconds):.0f} us (it had ended in {statistics.mean(ended):.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=25, help="of steps, of every kind, per set")
    parser.add_argument("--sets", type=int, default=4, help="sets of processes, one by one")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--write", action="store_true", help="replace the section in README.md")
    arguments = parser.parse_args()
    shape = Shape(arguments.rows, arguments.width, arguments.hidden, arguments.vocab)
    results: list[Times] = []
    for _ in range(arguments.sets):
        with RankPool(LAYOUT.world_size, timeout_s=600) as pool:
            results += pool.run(time_steps, shape, arguments.pairs, world_size=LAYOUT.world_size)
    # One rank of the last stage in each set.
    of_last = [times for times in results if times.is_last_stage][:: LAYOUT.dp]
    hand_seconds = [value for kind in KINDS for value in column(of_last, kind, "step")[1]]
    hand_inside = [value for kind in KINDS for value in column(of_last, kind, "inside")[1]]
    rows = [[HAND, f"{milliseconds(hand_seconds)} ms", 1, 1, "", f"{milliseconds(hand_inside)} ms"]]
    for kind in KINDS:
        seconds, until_all, inside = (
            column(of_last, kind, field) for field in ("step", "until_all", "inside")
        )
        target = f"at most {TARGET}" if kind in (PLUGIN, AHEAD) else ""
        ratios = [ratio_text(*seconds), ratio_text(*until_all)]
        median, own = (f"{milliseconds(values)} ms" for values in (seconds[0], inside[0]))
        rows.append([kind, median, *ratios, target, own])
    header = ["step", "median", "ratio (95 % interval)", "ratio until all ranks are done", "target"]
    header.append("processor time of loss and plugin")
    own_seconds = statistics.median(column(of_last, PLUGIN, "inside")[0])
    own_seconds -= statistics.median(hand_inside)
    share = own_seconds / statistics.median(hand_seconds)
    low, high = ratio_interval(*column(of_last, PLUGIN, "step"))
    by_set = [ratio(*column([times], PLUGIN, "step")) for times in of_last]
    spread = statistics.quantiles(hand_seconds, n=10)
    publish(
        "schedule_share",
        "A schedule step",
        f"The bench's GPT (4 layers, hidden {shape.hidden}, vocabulary {shape.vocab}, float32) in "
        "the real Megatron-Core schedule and DDP, PP=2, D=2, M=8 microbatches of "
        f"[{shape.rows}, {shape.width}], on four gloo ranks of one thread, in "
        f"{arguments.sets} sets of processes one after another. Each of {arguments.pairs} rounds "
        "of a set times each step right before or after a hand-written one, by "
        "chance and in another order; a ratio is the median of those of such pairs, and *two lines "
        "once more* shows how well ratios are measured here. The clock is that of a last stage, "
        "from a barrier to the schedule's return, `begin_step` included, and then to a second "
        "barrier. Freed memory is kept by the processes. The "
        "hand-written loss is `(losses * mask).sum() / num_tokens`, with `num_tokens` known "
        f"beforehand at no cost. {machine('megatron-core')}.\n\n"
        + markdown_table(header, rows)
        + f"\n\nThe hand-written step itself lies between {1e3 * spread[0]:.0f} and "
        f"{1e3 * spread[-1]:.0f} ms in 80 % of the rounds; four ranks share the processor's cores. "
        f"To three digits the plugin's interval is {low:.3f} to {high:.3f}, and its ratios set by "
        f"set are {', '.join(f'{value:.3f}' for value in by_set)}. The last column is "
        "the processor time of the last stage's own thread inside the loss, forward, and inside "
        f"`begin_step`, the iterators and `loss_func`: the plugin adds {1e3 * own_seconds:.1f} ms, "
        f"{share:.1%} of the step. Inside both losses and the plugin the stand-ins that let "
        "Megatron-Core run on a CPU are off, as they would pass every call of torch through "
        "Python. Where the ratio shows more, it is what the other ranks do on "
        "the same two cores, the backward pass, and the all-reduce's own threads. `validate` is an "
        "all-reduce more after the schedule, and `report` an all-reduce and a broadcast: there the "
        "last stage waits for the other ranks, as any job does that logs its loss.\n\n"
        "Waiting for the all-reduce of the counts where a stage first needs them, median: "
        f"{waiting(results, PLUGIN, last=True)} on the last stage, whose first microbatch comes "
        f"after the other stage's first forward pass; {waiting(results, PLUGIN, last=False)} on "
        "the first stage, which takes a microbatch with its weights at once. If that is begun "
        "before the step before it runs (`begin_step` communicates and returns, so it may be "
        "called as soon as the next microbatches are there), the first stage waits "
        f'{waiting(results, AHEAD, last=False)}. With `denominators="deferred"` nothing is '
        "needed before gradients are finalized.",
        write=arguments.write,
    )


if __name__ == "__main__":
    main()
