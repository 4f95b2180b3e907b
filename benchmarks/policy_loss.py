"""PPO's clipped loss, a KL penalty and their metrics, forward and backward, beside verl's.

python benchmarks/policy_loss.py              # about a minute
python benchmarks/policy_loss.py --rows 4 --width 1024 --rounds 10
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

from megatron_lossagg import GlobalCounts, LossTerm, token_losses, token_weights
from megatron_lossagg.objective.compile.compiled import make_evaluation
from megatron_lossagg.objective.evaluation import Evaluate
from megatron_lossagg.objective.objective import Objective
from megatron_lossagg.testing.memory import peak_memory

CLIP, DUAL_CLIP, KL_COEFFICIENT = 0.2, 3.0, 0.001
METHOD = """\
A microbatch of {rows} rows of {width} tokens, float32, `token-mean`: from the log-probabilities to
their gradient, with KL (k3) and the metrics that verl reports (both clip fractions, the mean log
ratio, the KL). verl: `compute_policy_loss_vanilla`, `kl_penalty` and `agg_loss`, called as its
actor calls them, with an int64 mask; each metric waits for a number. TRL: its trainer's
`_compute_loss`, given log-probabilities in place of a model. Here: `ppo_clip` and
`kl_penalty` as two terms with three metrics, evaluated as `loss_func` does, with weights that were
prepared once per step and stand for the mask, too. Gradients and losses are compared first. Memory
is the peak of what is allocated from the call to the end of the backward pass, beyond the inputs,
the gradient included, in tensors of [{rows}, {width}]."""
KEPT = """\
With freed memory kept by the process, which spares verl's temporaries the price of new pages:"""
IN_A_ROW = """\
The same, each called {calls} times in a row and not in turn with the others, so that its inputs are
in the caches, time per call:"""
CLOSING = """\
The targets were 6 times verl's speed and a quarter of its memory. Compiled, there is one kernel: as
a weighted sum is linear, it writes the gradient beside the sums, with exp computed twice per token,
and the backward pass multiplies it by what comes from above. Called in a row that meets the target.
In turn with the others, whose temporaries have then driven inputs and code out of the caches, as a
model's layers do, the same kernel waits for memory, and the target is missed. Without `compile` the
terms run operator by operator, as verl's do, and gain little. Other row counts and widths after the
timed one ({shapes}) made {num_graphs} graphs in all: one,
one more for up to 4096 tokens and one for a single row."""
CALLS_IN_A_ROW = 20
OTHER_SHAPES = ((16, 4096), (12, 1000), (7, 5000), (3, 7777), (2, 100), (1, 9000), (16, 8192))


def policy(log_probs: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages, mask = batch["old_log_probs"], batch["advantages"], batch["weights"]
    losses = token_losses.ppo_clip(
        log_probs, old, advantages, mask, clip_low=CLIP, clip_high=CLIP, dual_clip=DUAL_CLIP
    )
    log_ratio = (log_probs - old).detach()
    is_clipped = ((advantages > 0) & (log_ratio > math.log1p(CLIP))) | (
        (advantages < 0) & (log_ratio < math.log1p(-CLIP))
    )
    is_clipped_lower = (advantages < 0) & (log_ratio > math.log(DUAL_CLIP))
    metrics = {
        "pg_clipfrac": is_clipped.float(),
        "pg_clipfrac_lower": is_clipped_lower.float(),
        "ppo_kl": -log_ratio,
    }
    return losses, metrics


def kl(log_probs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return token_losses.kl_penalty(log_probs, batch["ref_log_probs"], batch["weights"])


def evaluation(*, compile: bool) -> Evaluate:
    names = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
    terms = [
        LossTerm("policy", policy, "token-mean", metrics=dict.fromkeys(names, "tokens")),
        LossTerm("kl", kl, "token-mean", coefficient=KL_COEFFICIENT),
    ]
    return make_evaluation(Objective.of(terms), compile=compile)


def make_batch(rows: int, width: int) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    log_probs = -torch.rand(rows, width, device=device) * 3
    lengths = torch.randint(width // 2, width + 1, (rows, 1), device=device)
    mask = (torch.arange(width, device=device) < lengths).long()
    num_tokens = mask.sum()
    counts = GlobalCounts(num_tokens, torch.tensor(rows), torch.tensor(rows))
    return {
        "log_probs": log_probs.requires_grad_(),
        "old_log_probs": log_probs.detach() + 0.2 * torch.randn_like(log_probs),
        "ref_log_probs": log_probs.detach() + 0.2 * torch.randn_like(log_probs),
        "advantages": torch.randn(rows, 1, device=device).repeat(1, width),
        "loss_mask": mask,
        "weights": token_weights(mask, "token-mean", counts),
        "num_tokens": int(num_tokens),
    }


def ours(evaluate: Evaluate, batch: dict[str, Any]) -> Callable[[], list[float]]:
    def run() -> Tensor:
        sums = evaluate(batch["log_probs"], batch, [batch["weights"]], [1.0, KL_COEFFICIENT])
        sums.total.backward()
        return sums.values

    return run


def verls(batch: dict[str, Any]) -> Callable[[], list[float]]:
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=CLIP,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
        clip_ratio_c=DUAL_CLIP,
    )
    counts = {"dp_size": 1, "batch_num_tokens": batch["num_tokens"]}
    config.global_batch_info.update(counts)
    log_probs, mask = batch["log_probs"], batch["loss_mask"]

    def run() -> list[float]:
        loss, metrics = compute_policy_loss_vanilla(
            batch["old_log_probs"], log_probs, batch["advantages"], mask, "token-mean", config
        )
        penalty = kl_penalty(log_probs, batch["ref_log_probs"], "k3")
        kl_loss = agg_loss(penalty, mask, "token-mean", **counts)
        total = loss + kl_loss * KL_COEFFICIENT
        total.backward()
        values = [total, loss, *metrics.values(), kl_loss.detach()]
        return [float(value) for value in values]

    return run


def trls(batch: dict[str, Any]) -> Callable[[], list[float]]:
    """TRL's `GRPOTrainer._compute_loss`, with an object that has what it reads of its trainer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from trl_stand_in import load_trl_loss

    compute = load_trl_loss()
    options = {
        "loss_type": "dapo",
        "low": CLIP,
        "high": CLIP,
        "delta": DUAL_CLIP,
        "beta": KL_COEFFICIENT,
        "ref": batch["ref_log_probs"],
        "num_items": torch.tensor(batch["num_tokens"]),
    }

    def run() -> list[float]:
        old, advantages = batch["old_log_probs"], batch["advantages"]
        loss = compute(batch["log_probs"], old, advantages, batch["loss_mask"], **options)
        loss.backward()
        return [float(loss.detach())]

    return run


def check_same(batch: dict[str, Any], candidates: Mapping[str, Callable[[], Any]]) -> None:
    """All compute one gradient and one loss."""
    gradients = []
    for run in candidates.values():
        batch["log_probs"].grad = None
        first = float(run()[0])
        gradients.append((first, batch["log_probs"].grad))
    for value, gradient in gradients[1:]:
        torch.testing.assert_close(value, gradients[0][0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, gradients[0][1], rtol=1e-3, atol=1e-9)


def compare(
    batch: dict[str, Any],
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    calls_in_a_row: int = 1,
) -> str:
    def drop_gradient() -> None:
        batch["log_probs"].grad = None

    def repeated(run: Callable[[], Any]) -> Callable[[], None]:
        def run_all() -> None:
            for _ in range(calls_in_a_row):
                drop_gradient()
                run()

        return run_all

    in_turn = {name: repeated(run) for name, run in candidates.items()}
    seconds = alternate(in_turn, rounds=rounds, warmup=3)
    seconds = {name: [s / calls_in_a_row for s in times] for name, times in seconds.items()}
    size = batch["weights"].numel() * batch["weights"].element_size()
    peaks = {}
    for name, run in candidates.items():
        drop_gradient()
        with peak_memory() as peak:
            run()
        peaks[name] = peak.num_bytes / size
    rows = [
        [
            name,
            milliseconds(seconds[name]),
            ratio_text(seconds["verl"], seconds[name]),
            f"{peaks[name]:.2f}",
            f"{peaks[name] / peaks['verl']:.2f}",
        ]
        for name in candidates
    ]
    return markdown_table(["", "median, ms", "verl / this", "peak memory", "of verl's"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the section of README.md")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=61)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    batch = make_batch(arguments.rows, arguments.width)
    compiled = evaluation(compile=True)
    candidates = {
        "verl": verls(batch),
        "TRL": trls(batch),
        "eager": ours(evaluation(compile=False), batch),
        "compile=True": ours(compiled, batch),
    }
    check_same(batch, candidates)
    tables = [compare(batch, candidates, arguments.rounds)]
    if not torch.cuda.is_available():
        keep_freed_memory()
        tables += [KEPT, compare(batch, candidates, arguments.rounds)]
    in_a_row = compare(batch, candidates, -(-arguments.rounds // 4), calls_in_a_row=CALLS_IN_A_ROW)
    tables += [IN_A_ROW.format(calls=CALLS_IN_A_ROW), in_a_row]
    for shape in OTHER_SHAPES:
        ours(compiled, make_batch(*shape))()
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    shapes = ", ".join(str(list(shape)) for shape in OTHER_SHAPES)
    text = "\n\n".join(
        [
            METHOD.format(rows=arguments.rows, width=arguments.width),
            f"{machine('verl', 'trl')}; {arguments.rounds} rounds.",
            *tables,
            CLOSING.format(shapes=shapes, num_graphs=num_graphs),
        ]
    )
    publish("policy_loss", "PPO, KL and metrics", text, write=arguments.write)


if __name__ == "__main__":
    main()
