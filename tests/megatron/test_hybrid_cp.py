"""Property: with hybrid context parallelism (R3) the gradient is that of the global batch.

Megatron's own `HybridCPDataLoaderWrapper` gives every sample a context-parallel size of its own and
sends it to other ranks, and its own schedule runs another number of samples on every rank. The
weights are made before, from the packed samples that a data-parallel rank loads, and travel along.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_lossagg import LossAggError, LossAggregator
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.ranks.parallel import (
    destroy_model_parallel,
    initialize_model_parallel,
)

# Lengths of the sub-samples of each data-parallel rank's packed samples; at most 8 tokens a rank,
# so they run on 1, 2 or 4 context-parallel ranks.
LENGTHS = {4: [[[8, 16]], [[32, 8]], [[8, 8, 16]], [[8]]], 2: [[[8, 16], [32]], [[8, 8], [16, 8]]]}
VOCAB = 11
LONG = pytest.mark.conformance
MODES = [
    ("token-mean", {}),
    ("seq-mean-token-mean", {}),
    pytest.param("token-sum", {}, marks=LONG),
    pytest.param("seq-mean-token-sum", {}, marks=LONG),
    pytest.param("seq-mean-token-sum-norm", {"loss_scale_factor": 5}, marks=LONG),
]


def packed_samples(dp_size):
    """Packed samples of every data-parallel rank: 1-D fields, as the loader wants them."""
    generator = torch.Generator().manual_seed(7)
    ranks = []
    for lengths_of_rank in LENGTHS[dp_size]:
        samples = []
        for lengths in lengths_of_rank:
            mask = (torch.rand(sum(lengths), generator=generator) < 0.6).to(torch.int64)
            if len(lengths) > 2:
                mask[lengths[0] : lengths[0] + lengths[1]] = 0  # a sequence without a valid token
            samples.append(
                {
                    "tokens": torch.randint(VOCAB, (sum(lengths),), generator=generator),
                    "labels": torch.randint(VOCAB, (sum(lengths),), generator=generator),
                    "loss_mask": mask,
                    "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
                }
            )
        ranks.append(samples)
    return ranks


def token_losses(logits, labels):
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def initial_weight():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)


def reference(dp_size, mode, options):
    """J and its gradient over the whole batch: loops over sequences, plain autograd."""
    weight = initial_weight().requires_grad_()
    sums, counts = [], []
    for samples in packed_samples(dp_size):
        for sample in samples:
            starts = sample["cu_seqlens"].tolist()
            for start, end in zip(starts[:-1], starts[1:], strict=True):
                part = {k: v[start:end] for k, v in sample.items() if k != "cu_seqlens"}
                losses = token_losses(weight[part["tokens"]][None], part["labels"][None])[0]
                sums.append(losses[part["loss_mask"] == 1].sum())
                counts.append(int(part["loss_mask"].sum()))
    num_seqs, num_tokens = sum(n > 0 for n in counts), sum(counts)
    total = {
        "token-mean": lambda: sum(sums) / num_tokens,
        "token-sum": lambda: sum(sums),
        "seq-mean-token-sum": lambda: sum(sums) / num_seqs,
        "seq-mean-token-mean": lambda: (
            sum(s / n for s, n in zip(sums, counts, strict=True) if n) / num_seqs
        ),
        "seq-mean-token-sum-norm": lambda: sum(sums) / options["loss_scale_factor"],
    }[mode]()
    total.backward()
    return total.item(), weight.grad


def bigram_chunk(layout):
    """A model that looks at one token only, so that no attention is needed, in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    from megatron_lossagg.testing.model.model_chunks import set_config_hooks
    from megatron_lossagg.testing.model.tiny_gpt import transformer_config

    config = transformer_config(TinyGPT(), layout, calculate_per_token_loss=True)
    config.hybrid_context_parallel = True
    config.max_seqlen_per_dp_cp_rank = 8

    class Bigram(MegatronModule):
        def __init__(self):
            super().__init__(config=config)
            self.model_type = ModelType.encoder_or_decoder
            self.share_embeddings_and_output_weights = False
            self.pre_process = self.post_process = True
            self.weight = torch.nn.Parameter(initial_weight())

        def set_input_tensor(self, input_tensor):
            pass

        def forward(self, tokens):
            return self.weight[tokens]

    chunk = DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(), module=Bigram()
    )
    set_config_hooks([chunk])
    return chunk, config


def run_hybrid(text, mode, options, faulty=False):
    """One step; (gradient on this rank, report, context-parallel sizes that ran here)."""
    from megatron.core import parallel_state
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_batch_on_this_hybrid_cp_rank

    layout = Layout.parse(text)
    initialize_model_parallel(layout)
    destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        context_parallel_size=layout.cp, hybrid_context_parallel=True
    )
    chunk, config = bigram_chunk(layout)
    aggregator = LossAggregator(
        lambda logits, microbatch: token_losses(logits, microbatch["labels"]),
        loss_agg_mode=mode,
        model_config=config,
        weight_dtype=torch.float64,
        **options,
    )
    samples = packed_samples(layout.dp)[parallel_state.get_data_parallel_rank()]
    # The loader's fields are 1-D; a microbatch is [1, t].
    step = aggregator.begin_step([{**s, "loss_mask": s["loss_mask"][None]} for s in samples])
    weighted = [
        {**sample, "loss_weights": microbatch["loss_weights"][0]}
        for sample, microbatch in zip(samples, step.microbatches, strict=True)
    ]
    if faulty and dist.get_rank() == 0:
        weighted[0]["loss_weights"] = weighted[0]["loss_weights"] * 0.5
    sizes = []

    def forward_step(data_iterator, model):
        sample = dict(next(data_iterator))
        sizes.append(int(sample.pop("local_cp_size")))
        batch, _ = get_batch_on_this_hybrid_cp_rank(sample, sizes[-1])
        return model(batch["tokens"]), partial(step.loss_func, batch)

    store = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=HybridCPDataLoaderWrapper(iter([weighted]), config),
        model=[chunk],
        num_microbatches=1,
        seq_length=32,
        micro_batch_size=1,
        forward_only=False,
    )
    try:
        step.validate()
        report = step.report(store)
    except LossAggError as error:
        report = str(error)
    parallel_state.destroy_model_parallel()
    return chunk.module.weight.main_grad.clone(), report, sizes


@pytest.mark.parametrize("text", ["D=4 M=1", pytest.param("D=2 C=2 M=2", marks=LONG)])
@pytest.mark.parametrize(("mode", "options"), MODES)
def test_every_mode(rank_pool, text, mode, options):
    """The whole model's gradient on every rank, and J, whatever sizes the scheduler chose."""
    layout = Layout.parse(text)
    results = rank_pool.run(run_hybrid, text, mode, options, world_size=4)
    expected, gradient = reference(layout.dp, mode, options)
    ran = sorted(size for _, _, sizes in results for size in set(sizes))
    assert set(ran) >= {1, 2, 4}, "samples of several context-parallel sizes"
    planned = len(LENGTHS[layout.dp][0])
    assert any(len(sizes) != planned for _, _, sizes in results), "not one call per microbatch"
    for found, report, _ in results:
        # Megatron divides by the token count in float32.
        assert torch.linalg.norm(found - gradient) <= 1e-6 * torch.linalg.norm(gradient)
        assert abs(report["loss"] - expected) <= 1e-12 * abs(expected)


def test_altered_weights_are_found(rank_pool):
    """Calls are not counted here, but the checksum still holds over all ranks."""
    for _, message, _ in rank_pool.run(run_hybrid, "D=4 M=1", "token-mean", {}, True, world_size=4):
        assert "the mode's checksum is" in message
