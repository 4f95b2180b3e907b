"""Aggregation alone, forward and backward, beside verl's `agg_loss`.

python benchmarks/aggregation.py              # some seconds per shape
python benchmarks/aggregation.py --quick
"""

from __future__ import annotations

import argparse
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
from megatron_lossagg.loss import masked_weighted_sum

METHOD = """\
Forward and backward of the aggregation of a microbatch, float32, from token losses that require a
gradient. verl's `agg_loss` is called as its trainer does, with an int64 mask (`attention_mask`) and
the counts of the global batch. *plugin* is what a step runs per microbatch, with the weights that
were prepared once; *agg_loss* is this library's function with verl's signature and the same
arguments as verl's. The floor is torch kernels alone, without autograd: `torch.dot` reads losses
and weights once, `torch.mul` writes the gradient once. Ratios above 1: faster than verl."""
CLOSING = """\
The targets were no slower than verl in any mode, and four times faster in `token-mean`. The former
is met with integer masks by both; with a float32 mask by the plugin but for `seq-mean-token-mean`
at the largest shape, which is as fast as verl's to a few percent, and not there by `agg_loss`. The
latter is met where masks have holes (but for the smallest shape) and missed for prefixes. verl's
`token-mean` selects by a branch per token, cheap where the mask is a prefix and dear where it has
holes; its sequence modes only multiply, which is cheap but lets a NaN at a masked token through,
and with a float32 mask nothing has to be cast either. Between the plugin and the floor: autograd's
own time, which is most of it at the smallest shape (*autograd alone* is `losses.sum().backward()`),
and a tensor of selected losses, multiplied in place and summed: three passes where the floor's
`torch.dot` makes one. Without the selection NaN at a masked token could not be kept out, and a dot
of millions of float32 losses rounds more than their sum."""
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
    weights = token_weights(mask, mode, counts, loss_scale_factor=width, norm_semantics="seq-mean")
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
        modes = ("token-mean", "seq-mean-token-mean") if tables else MODES
        rows = [
            compare(shape, mode, dtype, rounds, holes=holes) for shape in shapes for mode in modes
        ]
        tables.append(f"Masks {name}:\n\n{markdown_table(header, rows)}")
    text = "\n\n".join([METHOD, f"{machine('verl')}; {rounds} rounds.", *tables, CLOSING])
    publish("aggregation", "Aggregation alone", text, write=arguments.write)


if __name__ == "__main__":
    main()
