"""Aggregation alone, forward and backward, beside verl's `agg_loss`.

python benchmarks/aggregation.py              # some seconds per shape
python benchmarks/aggregation.py --quick
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
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

from megatron_lossagg import GlobalCounts, agg_loss, token_weights
from megatron_lossagg.weighted_sum import masked_weighted_sum

METHOD = """\
Forward and backward of the aggregation of a microbatch, float32, from token losses that require a
gradient. verl's `agg_loss` is called as its trainer does, with the counts of the global batch and
an int64 mask (`attention_mask`), or with one in float32. *plugin* is what a step runs per
microbatch, with the weights that were prepared once; *agg_loss* is this library's function with
verl's signature and the same arguments as verl's. The floor is torch kernels alone, without
autograd: `torch.dot` reads losses and weights once, `torch.mul` writes the gradient once. Ratios
above 1: faster than verl."""
ROUNDING = """\
Errors against float64 with 2^21 losses of float32, root mean square, in units of 2^-24 of the sum
of the absolute values; weights and mask are those of `seq-mean-token-mean`:"""
CLOSING = """\
The targets were no slower than verl in any row, the plugin at most 2.2 times the floor at
[32, 8192], rounding no worse than that of `sum`, and four times verl's speed in `token-mean`. The
first and the third are met; the second, too, but for what single rows differ by. On a CPU the host
reads a sum for nothing, and 0 times NaN or inf is NaN: losses are multiplied and summed as they
are, and masked ones are selected away only where the sum is not finite. Under torch.compile, in
graphs and on a device they are always selected away. `torch.dot` would take one pass for two, and
is the floor's, but adds thousands of terms one after another in float32: see its errors. That pass
and autograd's own time, which is most of it at the smallest shape (*autograd alone* is
`losses.sum().backward()`), are what the plugin has over the floor. A mask of any numbers selects,
so `agg_loss` makes one of 0 and 1 of it, a pass that verl, which multiplies by the mask, does not
have: with float32 masks its `seq-mean-token-mean` gains the least. It then gets counts and sums of
all rows from one pass and writes the gradient in place. verl's `token-mean` selects by a branch per
token, cheap where the mask is a prefix and dear where it has holes: the plugin has four times its
speed with holes (but for the smallest shape) and comes near it with long prefixes."""
SHAPES = ((8, 2048), (32, 8192), (64, 32768))
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def compare(
    shape: tuple[int, int], mode: str, mask_dtype: torch.dtype, rounds: int, *, holes: bool
) -> list[str]:
    from verl.trainer.ppo.core_algos import agg_loss as verl_agg_loss

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_seqs, width = shape
    losses = torch.randn(shape, device=device, requires_grad=True)
    lengths = torch.randint(1, width + 1, (num_seqs, 1), device=device)
    mask = torch.arange(width, device=device) < lengths
    if holes:
        mask &= torch.rand(shape, device=device) < 0.5
    mask = mask.to(mask_dtype)
    num_tokens = int(mask.sum())
    counts = GlobalCounts(*(torch.tensor(n) for n in (num_tokens, num_seqs, num_seqs)))
    of_norm = {"loss_scale_factor": width, "norm_semantics": "seq-mean"}
    weights = token_weights(mask, mode, counts, **of_norm if mode.endswith("-norm") else {})
    arguments = {
        "batch_num_tokens": num_tokens,
        "global_batch_size": num_seqs,
        "loss_scale_factor": width,
    }
    flat, upstream = losses.detach().view(-1), torch.ones((), device=device)

    def with_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            losses.grad = None
            loss().backward()

        return run

    seconds = alternate(
        {
            "verl": with_backward(lambda: verl_agg_loss(losses, mask, mode, **arguments)),
            "plugin": with_backward(lambda: masked_weighted_sum(losses, weights)),
            "agg_loss": with_backward(
                lambda: agg_loss(losses, mask, mode, norm_semantics="seq-mean", **arguments)
            ),
            "autograd alone": with_backward(lambda: losses.sum()),
            "floor": lambda: (torch.dot(flat, weights.view(-1)), torch.mul(weights, upstream)),
        },
        rounds=rounds,
        warmup=5,
    )
    verl, floor = seconds["verl"], seconds["floor"]
    return [
        f"{list(shape)} {mode}",
        *(milliseconds(seconds[name]) for name in ("verl", "plugin", "agg_loss")),
        ratio_text(verl, seconds["plugin"]),
        ratio_text(verl, seconds["agg_loss"]),
        ratio_text(seconds["plugin"], floor),
        ratio_text(seconds["autograd alone"], floor),
    ]


def profile(rounds: int) -> str:
    """What the plugin and its floor consist of at [32, 8192], in a sentence."""
    losses, weights = torch.randn(2, 32, 8192)
    upstream = torch.ones(())
    seconds = alternate(
        {
            "losses times weights": lambda: torch.mul(losses, weights),
            "their sum": lambda: losses.sum(),
            "the gradient": lambda: torch.mul(weights, upstream),
            "the floor's `torch.dot`": lambda: torch.dot(losses.view(-1), weights.view(-1)),
        },
        rounds=rounds,
        warmup=5,
    )
    parts = ", ".join(f"{name} {milliseconds(found)} ms" for name, found in seconds.items())
    return f"The passes at [32, 8192], each alone: {parts}."


def rounding(draws: int) -> str:
    """Errors of sums of 64 rows of 32768 float32 losses, in units of 2^-24 of what was summed."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for kind, signed in (("random signs", True), ("one sign", False), ("equal numbers", False)):
        errors: dict[str, list[float]] = {}
        for _ in range(draws):
            losses = torch.randn(64, 32768, generator=generator)
            losses = losses if signed else losses.abs()
            mask = (torch.rand(64, 32768, generator=generator) < 0.7).float()
            if kind == "equal numbers":
                losses = losses[:1, :1].expand_as(losses).contiguous()
            weights = mask / mask.sum(dim=-1, keepdim=True) / 64
            lengths = mask.sum(dim=-1)
            by_weights = (losses.double() * weights.double()).sum()
            by_mask = ((losses.double() * mask.double()).sum(dim=-1) / lengths).mean()
            unit = 2**-24 * (losses.abs().double() * weights.double()).sum()
            for name, found, exact in (
                ("`sum` of products", (losses * weights).sum(), by_weights),
                ("plugin", masked_weighted_sum(losses, weights), by_weights),
                ("`torch.dot`", torch.dot(losses.view(-1), weights.view(-1)), by_weights),
                ("`sum` of each row", ((losses * mask).sum(dim=-1) / lengths).mean(), by_mask),
                ("agg_loss", agg_loss(losses, mask, "seq-mean-token-mean"), by_mask),
            ):
                errors.setdefault(name, []).append(float((found - exact) / unit))
        of_all = [math.sqrt(sum(e * e for e in found) / draws) for found in errors.values()]
        rows.append([kind, *(f"{error:,.2g}" for error in of_all)])
    return markdown_table(["losses", *errors], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the section of README.md")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the smaller shapes")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    shapes = SHAPES[:2] if arguments.quick else SHAPES
    rounds = 15 if arguments.quick else 61
    header = [
        "case",
        "verl, ms",
        "plugin, ms",
        "agg_loss, ms",
        "verl / plugin",
        "verl / agg_loss",
        "plugin / floor",
        "autograd alone / floor",
    ]
    tables = []
    for name, dtype, holes in (
        ("in int64, each row a prefix", torch.int64, False),
        ("in int64, with holes (half of the tokens, as of a filter)", torch.int64, True),
        ("in float32, each row a prefix", torch.float32, False),
    ):
        modes = ("token-mean", "seq-mean-token-mean") if holes else MODES
        rows = [
            compare(shape, mode, dtype, rounds, holes=holes) for shape in shapes for mode in modes
        ]
        tables.append(f"Masks {name}:\n\n{markdown_table(header, rows)}")
    errors = f"{ROUNDING}\n\n{rounding(4 if arguments.quick else 20)}"
    described = f"{machine('verl')}; {rounds} rounds."
    text = "\n\n".join([METHOD, described, *tables, profile(rounds), errors, CLOSING])
    publish("aggregation", "Aggregation alone", text, write=arguments.write)


if __name__ == "__main__":
    main()
