"""What grows with what, measured, and what a step costs at 64 to 16384 ranks: `docs/scale.md`.

python benchmarks/scale.py --write
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import alternate, keep_freed_memory, machine, markdown_table

from megatron_lossagg import GlobalCounts, LossAggregator, ParallelGroups, token_weights
from megatron_lossagg.counts import count_local, start_reduction
from megatron_lossagg.counts.sequences import Sequences
from megatron_lossagg.testing import RankPool

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MICROBATCHES = (1, 4, 16, 64, 256, 1024)
UNITS = (10**2, 10**3, 10**4, 10**5, 10**6)
RANKS = (64, 256, 1024, 4096, 16384)
TOKENS = 10**12

# NCCL's own latency model, in us: all-reduce by trees with the LL protocol over NVLink and network.
NCCL_TUNING = (
    "https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/"
    "src/graph/tuning.cc"
)
BASE_US, NVLINK_US, NETWORK_US, LL_BETWEEN_NODES = 4.4, 0.52, 5.0, 1.8
GPUS_PER_NODE = 8
BYTES_PER_US = 10e3  # 10 GB/s
STEP_S = 10.0


def all_reduce_us(num_ranks: int, num_bytes: int) -> float:
    """Of the counts over data-parallel ranks that fill nodes of 8 GPUs."""
    nodes = math.ceil(num_ranks / GPUS_PER_NODE)
    inside = (min(num_ranks, GPUS_PER_NODE) - 1) * NVLINK_US * LL_BETWEEN_NODES
    levels = math.ceil(math.log2(nodes)) if nodes > 1 else 0
    return BASE_US + 2 * (inside + levels * NETWORK_US) + num_bytes / BYTES_PER_US


def begin_step_ms(num_microbatches: int, num_units: int | None, rounds: int) -> float:
    """The median of `begin_step` with [4, 512] masks, in one process."""
    aggregator = LossAggregator(
        lambda output, microbatch: output,
        loss_agg_mode="unit-mean-token-mean" if num_units else "seq-mean-token-mean",
        model_config=SimpleNamespace(calculate_per_token_loss=False),
        groups=ParallelGroups.single_process(),
    )
    microbatches = [{"loss_mask": torch.ones(4, 512)} for _ in range(num_microbatches)]
    if num_units:
        for microbatch in microbatches:
            microbatch["unit_ids"] = torch.randint(num_units, (4,))

    def begin() -> object:
        step = aggregator.begin_step(microbatches, num_units=num_units)
        return step.plan.weights(0)

    return 1e3 * statistics.median(alternate({"": begin}, rounds=rounds)[""])


def count_many_tokens() -> tuple[int, float]:
    """On every rank: T of ranks that hold 10^12 + rank tokens each, and T times the weight 1/T."""
    local = count_local([Sequences.of(torch.ones(1, 1))])
    local.vector[8] = TOKENS + dist.get_rank()  # num_tokens, the first count behind the header
    counts = start_reduction(local, ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD))
    num_tokens = int(counts.wait().num_tokens)
    weight = token_weights(torch.ones(1, 1), "token-mean", GlobalCounts(num_tokens, 1, 1))
    return num_tokens, float(weight.double() * num_tokens)


def fitted(sizes: tuple[int, ...], times: list[float]) -> tuple[float, float]:
    """(constant, slope per unit of size): through the smallest and the largest."""
    slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    return times[0] - slope * sizes[0], slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write docs/scale.md")
    arguments = parser.parse_args()
    keep_freed_memory()
    by_m = [begin_step_ms(m, None, arguments.rounds) for m in MICROBATCHES]
    by_u = [begin_step_ms(8, u, arguments.rounds) for u in UNITS]
    constant, per_microbatch = fitted(MICROBATCHES, by_m)
    _, per_unit = fitted(UNITS, by_u)
    with RankPool(2) as pool:
        counted = pool.run(count_many_tokens)
    expected = 2 * TOKENS + 1
    assert all(num_tokens == expected for num_tokens, _ in counted), counted
    error = max(abs(product - 1) for _, product in counted)
    plan_us = 1e3 * (constant + 64 * per_microbatch)
    table = []
    for ranks in RANKS:
        counts_us, units_us = all_reduce_us(ranks, 256), all_reduce_us(ranks, 16 * 10**5)
        share = (plan_us + counts_us) / (1e6 * STEP_S)
        times = (f"{counts_us:.0f} us", f"{plan_us:.0f} us", f"{share:.4%}", f"{units_us:.0f} us")
        table.append([ranks, *times])
    m_header, u_header = ["M", *map(str, MICROBATCHES)], ["U (M = 8)", *(f"{u:,}" for u in UNITS)]
    u_rows = [
        ["ms", *(f"{t:.2f}" for t in by_u)],
        ["bytes reduced", *(f"{16 * u:,}" for u in UNITS)],
    ]
    header = ["ranks", "all-reduce of the counts", "begin_step on the host"]
    header += ["share of the step, nothing overlapped", "all-reduce of 10^5 units"]
    text = f"""# Scale

Written by `benchmarks/scale.py --write`: what a step of the plugin costs as ranks, microbatches,
sequences, tokens and units grow. Measured on {machine()}.

## What grows with what

N sequences and M microbatches on this rank, U units in the global batch, K pairs of a mode and a
mask; D data-parallel ranks.

| | work of a rank | bytes that it reduces | bytes that it holds |
| --- | --- | --- | --- |
| counts | one pass over its masks, O(M) calls | 256, for any M, K and D | 8 N per mask |
| weights | one multiplication per microbatch and pair | none | M K masks of `weight_dtype` |
| units | O(N + U) | 16 U, a second all-reduce | 16 U + 8 N |
| `loss_func` | O(tokens of the microbatch) | none | two numbers per term |
| `validate`, `report` | O(K) | tens of bytes per term, one all-reduce each | |

Nothing of this grows with D but the latency of a collective. No rank learns which sequences
another one has.

## Tokens

Counts are int64 from the mask to the weight's denominator, which is float64: exact to 2^53 tokens.
Two gloo ranks with 10^12 and 10^12 + 1 tokens counted {expected:,}, to the token, and
T times the float32 weight 1/T was 1 to {error:.0e}. A row's own tokens are summed in float32 up
to a width of 2^24, where such sums are exact, and in float64 beyond it. Regime R3
(`calculate_per_token_loss`) is the exception: Megatron sums `num_tokens` in int32, so a step of
more than 2^31 - 1 tokens raises there.

## Microbatches and units

`begin_step` and the first microbatch's weights, masks of [4, 512], one process that keeps freed
memory, median of {arguments.rounds}.

{markdown_table(m_header, [["ms", *(f"{t:.2f}" for t in by_m)]])}

About {constant:.2f} ms and {1e3 * per_microbatch:.1f} us per microbatch of this size.

{markdown_table(u_header, u_rows)}

About {1e6 * per_unit:.1f} ns per unit: counting goes over all U, since units are numbered over the
global batch. A million units are 16 MB a step.

## 64 to 16384 ranks

Computed, not measured. The assumptions:

- All ranks are data-parallel (the worst case; with TP, PP or CP the group is smaller), 8 GPUs a
  node with NVLink inside and a network between nodes.
- NCCL picks trees and its low-latency protocol for 256 bytes. Their latency is what NCCL's own
  tuning model says ([tuning.cc]({NCCL_TUNING})): {BASE_US} us, and
  twice the sum of 7 hops of {NVLINK_US} us x {LL_BETWEEN_NODES} inside a node and log2(nodes) of
  {NETWORK_US} us between nodes. Congestion and stragglers come on top: ranks wait for the last one
  in any collective of the step, this one included.
- Units: U = 100,000, of which the 1.6 MB are moved at {BYTES_PER_US / 1e3:.0f} GB/s besides.
- 64 microbatches a rank, planned as fast as measured above, and a step of {STEP_S:.0f} s.

{markdown_table(header, table)}

The all-reduce grows by {2 * NETWORK_US:.0f} us each time that the nodes double. It is started by
`begin_step` and waited for at the first weights, so what the caller does between the two, and on
later pipeline stages the first forward pass of the earlier ones, hides it.
"""
    print(text)
    if arguments.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
