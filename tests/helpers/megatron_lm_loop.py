"""What Megatron-LM's `train_step` and `evaluate` do around a forward step, on the real schedules.

Megatron-LM itself is not installed: `Host` holds what these two do with a forward step and with
what it reports, and `get_batch` what a script's does.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.testing.batch.global_batch import ragged_batch
from megatron_lossagg.testing.gradients import whole_model_gradient
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.model_chunks import build_model_chunks, token_log_probs
from megatron_lossagg.testing.model.parameter_names import unwrap
from megatron_lossagg.testing.model.tiny_gpt import TinyGPT
from megatron_lossagg.testing.reference import reference_run
from megatron_lossagg_plugin.megatron_lm import broadcast_batch

GPT = TinyGPT()
MODE = "seq-mean-token-mean"
FIELDS = ("tokens", "labels", "position_ids", "loss_mask", "advantages")
NAME = "lm loss"


def policy_losses(logits, batch):
    return -batch["advantages"] * token_log_probs(logits, batch["labels"])


def cross_entropy(logits, batch):
    return -token_log_probs(logits, batch["labels"])


def batch_of_seed(seed, layout):
    batch = ragged_batch(16, dp=2, num_microbatches=2, extra_fields=("advantages",), seed=seed)
    return batch.split(layout.dp, layout.num_microbatches)


@cache
def on_this_rank(gpt, seed, token_losses):
    return reference_run(gpt, batch_of_seed(seed, Layout()), token_losses, MODE)


@cache
def reference(pool, seed, gpt=GPT, token_losses=policy_losses):
    """(J, gradient) of a batch in one process."""
    [result] = pool.run(on_this_rank, gpt, seed, token_losses, world_size=1)
    return result


def num_tokens_of(seed):
    return int(batch_of_seed(seed, Layout()).rows["loss_mask"].sum())


# What a training script does around a forward step.


class Host:
    """Megatron-LM's `train_step` and `evaluate`, without arguments, timers and the optimizer."""

    gpt = GPT

    def __init__(
        self, layout, per_token, gpt=GPT, is_rerun=False, config_of=None, **aggregator_arguments
    ):
        from megatron.core import rerun_state_machine as rerun

        modes = rerun.RerunMode
        mode = modes.REPORT_DETERMINISM_STATS if is_rerun else modes.DISABLED
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(mode=mode)
        # In 0.16.1 its log of statistics fails on an attribute that does not exist.
        rerun.get_rerun_state_machine()._maybe_report_stats = lambda: None
        self.layout = layout
        self.chunks = build_model_chunks(gpt, layout, calculate_per_token_loss=per_token)
        self.num_optimizer_steps = 0
        config = unwrap(self.chunks[0]).config
        arguments = {
            "loss_fn": policy_losses,
            "loss_agg_mode": MODE,
            "model_config": config if config_of is None else config_of(config),
            "weights_key": "loss_mask",
            "weight_dtype": torch.float64,
            **aggregator_arguments,
        }
        self.aggregator = LossAggregator(arguments.pop("loss_fn"), **arguments)

    def iterators(self, *seeds, num_microbatches=None):
        """One per chunk, over several steps; None where Megatron-LM loads no data."""
        from megatron.core import parallel_state
        from megatron.core.rerun_state_machine import RerunDataIterator

        num_microbatches = num_microbatches or self.layout.num_microbatches
        dp_rank = parallel_state.get_data_parallel_rank()
        batches = [
            batch_of_seed(s, Layout(self.layout.dp, num_microbatches=num_microbatches))
            for s in seeds
        ]
        microbatches = [m for batch in batches for m in batch.microbatches(dp_rank)]
        iterators = []
        for chunk in self.chunks:
            model = unwrap(chunk)
            has_data = model.pre_process or model.post_process
            has_data = has_data and parallel_state.get_tensor_model_parallel_rank() == 0
            iterators.append(RerunDataIterator(iter(microbatches)) if has_data else None)
        return iterators if len(iterators) > 1 else iterators[0]

    def schedule(self, forward_step, data_iterator, num_microbatches, forward_only):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows_of_rank = 16 // self.layout.dp
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=16,
            micro_batch_size=rows_of_rank // num_microbatches,
            forward_only=forward_only,
        )

    def train_step(self, forward_step, data_iterator, num_microbatches=None):
        """(reported losses or {}, gradient of the whole model)."""
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        num_microbatches = num_microbatches or self.layout.num_microbatches
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            losses = self.schedule(forward_step, data_iterator, num_microbatches, False)
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
        self.num_optimizer_steps += 1
        return self.reduced(losses), whole_model_gradient(self.chunks)

    def reduced(self, losses):
        reduced = {}
        for key in losses[0] if losses else ():
            value = torch.vstack([x[key].view(-1) for x in losses]).sum(dim=0)
            dist.all_reduce(value, group=dp_cp_group())
            reduced[key] = (value[0] / value[1]).item()
        return reduced

    def evaluate(self, forward_step, data_iterator, eval_iters, num_microbatches, sft=False):
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

        for chunk in self.chunks:
            chunk.eval()
        machine = get_rerun_state_machine()
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)
        totals = {}
        with torch.no_grad():
            for _ in range(eval_iters):
                losses = self.schedule(forward_step, data_iterator, num_microbatches, True)
                for key in losses[0] if losses else ():
                    total = totals.setdefault(key, torch.zeros(2, device="cuda"))
                    value = torch.vstack([x[key].view(-1) for x in losses])
                    if sft:
                        value = (value[:, 0] / value[:, 1].clamp(min=1)).mean()
                        dist.all_reduce(value, group=dp_cp_group())
                        total += torch.stack([value / dp_cp_group().size(), torch.ones_like(value)])
                    else:
                        value = value.sum(dim=0)
                        dist.all_reduce(value, group=dp_cp_group())
                        total += value
        for chunk in self.chunks:
            chunk.train()
        machine.set_mode(mode)
        return {key: (total[0] / total[1]).item() for key, total in totals.items()}


def dp_cp_group():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def is_middle_stage(vp_stage):
    from megatron.core import parallel_state

    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    return not (
        parallel_state.is_pipeline_first_stage(**stage)
        or parallel_state.is_pipeline_last_stage(**stage)
    )


def get_batch(data_iterator, vp_stage=None):
    """Of an RL script: tensor-parallel rank 0 reads, fields of its own travel along."""
    if is_middle_stage(vp_stage):
        return None
    batch = None if data_iterator is None else next(data_iterator)
    return slice_for_cp(broadcast_batch(batch, FIELDS))


def call_model(model, batch):
    return model(batch.get("tokens"), batch.get("position_ids"), None)
