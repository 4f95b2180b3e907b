"""Log-probabilities and entropy from logits, beside Megatron-Core's own unchunked function.

    python benchmarks/logits.py --quick     # 2048 tokens, a minute
    python benchmarks/logits.py --write     # [8192, 32768], some minutes

Forward and backward in one process. Megatron's function overwrites float32 logits, so every
candidate gets fresh ones, outside the clock.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial

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

from megatron_lossagg import log_probs_and_entropy_from_logits, log_probs_from_logits
from megatron_lossagg.testing import Layout
from megatron_lossagg.testing.memory import peak_memory
from megatron_lossagg.testing.ranks.parallel import current_device, initialize_model_parallel

CHUNK = 32  # tokens whose logits stay in the cache, for the parts

Outputs = tuple[Tensor, ...]
MEGATRON = "Megatron-Core: log-probs"
PLAIN = "Megatron-Core: log-probs; entropy in plain torch"
LOG_PROBS, BOTH = "log-probs", "log-probs and entropy"
READ, WRITE, EXP = "read the logits (`amax`)", "write the gradient (`zero_`)", "`exp` in the cache"
MUL = "`mul` in the cache"


def megatron(logits: Tensor, labels: Tensor) -> Outputs:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return (-vocab_parallel_cross_entropy(logits, labels),)


def megatron_and_plain_entropy(logits: Tensor, labels: Tensor) -> Outputs:
    log_p = logits.float().log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return *megatron(logits.clone(), labels), entropy


def candidates(mask: Tensor, dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Outputs]]:
    """What is compared: functions of (logits, labels) that return one or two results."""
    found: dict[str, Callable[[Tensor, Tensor], Outputs]] = {MEGATRON: megatron}
    if dtype == torch.float32:
        found[PLAIN] = megatron_and_plain_entropy
    for name, function in (
        (LOG_PROBS, lambda *args, **options: (log_probs_from_logits(*args, **options),)),
        (BOTH, log_probs_and_entropy_from_logits),
    ):
        found[name] = function
        found[f"{name}, 10% masked"] = partial(function, loss_mask=mask)
        for backward in ("keep-softmax", "overwrite-logits"):
            if backward == "keep-softmax" and dtype == torch.bfloat16:
                continue  # is the same as the default
            found[f'{name}, `backward="{backward}"`'] = partial(function, backward=backward)
    return found


def forward_and_backward(
    function: Callable[[Tensor, Tensor], Outputs], logits: Tensor, labels: Tensor
) -> None:
    outputs = function(logits, labels)
    torch.autograd.grad(outputs, logits, [torch.full_like(output, 0.5) for output in outputs])


def measure(dtype: torch.dtype, tokens: int, vocab: int, rounds: int) -> str:
    device, shape = current_device(), (1, tokens, vocab)
    original = torch.randn(shape, device=device).to(dtype)
    labels = torch.randint(vocab, shape[:-1], device=device)
    mask = torch.rand(shape[:-1], device=device) < 0.9
    logits = torch.empty_like(original, requires_grad=True)
    runs = {
        name: partial(forward_and_backward, function, logits, labels)
        for name, function in candidates(mask, dtype).items()
    }
    peaks = {}
    for name, run in runs.items():
        logits.data.copy_(original)
        with peak_memory() as peak:
            run()
        peaks[name] = peak.num_bytes / (logits.numel() * logits.element_size())
    gradient = torch.empty_like(original)
    few = torch.randn(CHUNK, vocab, device=device)
    out = torch.empty_like(few)
    parts = {
        READ: lambda: logits.data.amax(dim=-1),
        WRITE: gradient.zero_,
        EXP: lambda: [torch.exp(few, out=out) for _ in range(tokens // CHUNK)],
        MUL: lambda: [torch.mul(few, few, out=out) for _ in range(tokens // CHUNK)],
    }
    seconds = alternate(
        {**runs, **parts}, rounds=rounds, warmup=1, prepare=lambda: logits.data.copy_(original)
    )
    header = (
        f"[{tokens}, {vocab}] {str(dtype).removeprefix('torch.')}",
        "ms",
        "time / Megatron-Core's log-probs",
        "peak memory / logits",
    )
    rows = [
        (
            name,
            milliseconds(seconds[name]),
            ratio_text(seconds[name], seconds[MEGATRON]),
            f"{peaks[name]:.3f}",
        )
        for name in runs
    ]
    passes = ", ".join(f"{name} {milliseconds(seconds[name])} ms" for name in parts)
    text = f"{markdown_table(header, rows)}\n\nOne pass over all tokens: {passes}."
    if PLAIN in runs:
        against_plain = ratio_text(seconds[BOTH], seconds[PLAIN])
        text += f" Log-probs and entropy against the same with plain torch's: {against_plain}."
    return text


METHOD = """\
Forward and backward in one process, TP=1; every candidate gets fresh logits outside the clock, as
Megatron-Core's `vocab_parallel_cross_entropy` overwrites those of float32 with its softmax and then
with the gradient. Peak memory is what torch allocates from the call to the end of the backward
pass, gradient included: 1.0 is the gradient alone, 0.0 that nothing is allocated."""

VERDICT = """\
Target: at most 1.1 times the time of Megatron-Core's log-probs, and beyond the logits and their
gradient a tenth of the logits. The memory is met everywhere. The time is met for log-probs, and for
log-probs and entropy together with float32 logits and `backward="keep-softmax"`, whose softmax
waits in the memory of the gradient. It is missed for both together where the softmax is made again:
two passes of `exp`, which Megatron-Core makes once, two reads of the logits and one write of the
gradient take what log-probs take, and to these the entropy adds seven passes in the cache, as long
as `mul` each (three forward: minus the maximum, times the softmax, sum; four backward), which
torch's operators do not join. Megatron-Core has no entropy; with plain torch's it takes a
multiple."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="2048 tokens, three rounds")
    parser.add_argument("--write", action="store_true", help="into benchmarks/README.md")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.rounds = 2048, 3
    keep_freed_memory()
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex")
    initialize_model_parallel(Layout())
    tables = [
        measure(getattr(torch, name), arguments.tokens, arguments.vocab, arguments.rounds)
        for name in arguments.dtypes
    ]
    method = " ".join(METHOD.split())
    verdict = " ".join(VERDICT.split())
    text = "\n\n".join([method, machine("megatron-core") + ".", *tables, verdict])
    publish("logits", "Log-probabilities and entropy from logits", text, write=arguments.write)


if __name__ == "__main__":
    main()
