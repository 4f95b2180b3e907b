"""Log-probabilities and entropy from logits, beside Megatron-Core's own unchunked function.

    python benchmarks/logits.py                                   # [8192, 32768], some minutes
    python benchmarks/logits.py --tokens 2048 --dtypes bfloat16

One process, forward and backward, all of one round after another so that they share what the
machine does meanwhile; the medians of the rounds. Megatron's function overwrites float32 logits, so
it gets fresh ones each time, outside the clock. Memory is the peak of what is allocated from the
call to the end of the backward pass, the gradient included, in units of the logits.

On a machine that does other things, too, set OMP_NUM_THREADS=1 and look at the CPU time: threads
that wait for each other wait for the others' work as well.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_lossagg import log_probs_and_entropy_from_logits, log_probs_from_logits
from megatron_lossagg.testing import Layout
from megatron_lossagg.testing.memory import peak_memory
from megatron_lossagg.testing.parallel import current_device, initialize_model_parallel

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def megatron(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return (-vocab_parallel_cross_entropy(logits, labels),)


def megatron_and_plain_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    log_p = logits.float().log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return *megatron(logits.clone(), labels), entropy


def chunked(logits: Tensor, labels: Tensor, **options: str) -> tuple[Tensor, ...]:
    return (log_probs_from_logits(logits, labels, chunk_size=ARGUMENTS.chunk_size, **options),)


def with_entropy(logits: Tensor, labels: Tensor, **options: str) -> tuple[Tensor, ...]:
    size = ARGUMENTS.chunk_size
    return log_probs_and_entropy_from_logits(logits, labels, chunk_size=size, **options)


PLAIN = "Megatron-Core, and entropy in plain torch"
CANDIDATES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "Megatron-Core, unchunked: log-probs": megatron,
    PLAIN: megatron_and_plain_entropy,
    "log-probs": chunked,
    '  backward="keep-softmax"': partial(chunked, backward="keep-softmax"),
    '  backward="overwrite-logits"': partial(chunked, backward="overwrite-logits"),
    "log-probs and entropy": with_entropy,
    '  backward="keep-softmax" ': partial(with_entropy, backward="keep-softmax"),
    '  backward="overwrite-logits" ': partial(with_entropy, backward="overwrite-logits"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--chunk-size", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--skip-plain",
        action="store_true",
        help="leave out its entropy in plain torch",
    )
    return parser.parse_args()


def run(function: Callable[..., tuple[Tensor, ...]], logits: Tensor, labels: Tensor) -> None:
    outputs = function(logits, labels)
    torch.autograd.grad(outputs, logits, [torch.full_like(output, 0.5) for output in outputs])
    if logits.is_cuda:
        torch.cuda.synchronize()


def measure(dtype: torch.dtype) -> None:
    device, shape = current_device(), (1, ARGUMENTS.tokens, ARGUMENTS.vocab)
    original = torch.randn(shape, device=device).to(dtype)
    labels = torch.randint(ARGUMENTS.vocab, shape[:-1], device=device)
    logits = torch.empty_like(original, requires_grad=True)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
    peaks = {}
    if ARGUMENTS.skip_plain:
        del seconds[PLAIN]
    for index in range(ARGUMENTS.rounds + 1):
        for name in seconds:
            logits.data.copy_(original)
            if index == 0:  # warms up, too
                size = logits.numel() * logits.element_size()
                with peak_memory() as peak:
                    run(CANDIDATES[name], logits, labels)
                peaks[name] = peak.num_bytes / size
                continue
            start, start_cpu = time.perf_counter(), time.process_time()
            run(CANDIDATES[name], logits, labels)
            times = time.perf_counter() - start, time.process_time() - start_cpu
            seconds[name].append(times)
    threads = "" if logits.is_cuda else f", {torch.get_num_threads()} threads"
    print(
        f"\n{list(shape[1:])} {str(dtype).removeprefix('torch.')}, {device.type}{threads}, ", end=""
    )
    print(f"chunks of {ARGUMENTS.chunk_size or 'the default size'}, {ARGUMENTS.rounds} rounds")
    print(f" {'':36}  median  ratio   CPU time  ratio   peak memory / logits")
    base = None
    for name, values in seconds.items():
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        base = base or (wall, cpu)
        print(f" {name:36} {wall:6.3f} s  {wall / base[0]:5.2f}  {cpu:7.3f} s", end="")
        print(f"  {cpu / base[1]:5.2f}   {peaks[name]:.3f}", flush=True)


def keep_freed_memory() -> None:
    """On the CPU, have freed memory used again without asking the system, as on a GPU.

    Else each large tensor is new pages, which the system sets to zero in the clock.
    """
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


if __name__ == "__main__":
    ARGUMENTS = parse()
    keep_freed_memory()
    initialize_model_parallel(Layout())
    for name in ARGUMENTS.dtypes:
        measure(getattr(torch, name))
