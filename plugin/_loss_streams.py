"""Megatron-LM: the training and evaluation streams of a rank that computes the loss.

The data iterators that `forward_step` is given are wrapped; `train_step` and `evaluate`, which made
them, are not patched.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from megatron_lossagg.aggregator import LossAggregator
from megatron_lossagg.errors import LossAggError
from megatron_lossagg.weights.microbatch import NumMicrobatches

from ._megatron import megatron


@dataclass(frozen=True)
class Stream:
    """What steps of one kind are planned with.

    Attributes:
        aggregator: the plugin.
        num_microbatches: M of a step, or a function that gives it.
        options: further arguments of `LossAggregator.wrap`.
    """

    aggregator: LossAggregator
    num_microbatches: NumMicrobatches
    options: dict[str, Any]

    def wrap(self, data_iterator: Any) -> Any:
        """`LossAggregator.wrap`."""
        return self.aggregator.wrap(
            data_iterator, num_microbatches=self.num_microbatches, **self.options
        )


class LossStreams:
    """The loss chunk's iterators on this rank: one wrapped for training, one for evaluation."""

    def __init__(self, training: Stream, evaluation: Stream) -> None:
        self._streams = {True: training, False: evaluation}
        self._is_training = True
        self._wrapped: dict[bool, tuple[Any, Any]] = {}
        self._is_without_data = False

    def aggregator(self, is_training: bool) -> LossAggregator:
        """The plugin of a kind of step."""
        return self._streams[is_training].aggregator

    def enter(self, data_iterator: Any, is_training: bool) -> Any:
        """The wrapped iterator, or None on a rank without data; called once per microbatch."""
        if is_training and not self._is_training:
            # A schedule that runs forward only has no finalize hook: check its last step here.
            self.aggregator(False).validate()
        self._is_training = is_training
        if data_iterator is None:
            self._enter_without_data()
            return None
        raw, wrapped = self._wrapped.get(is_training, (None, None))
        if raw is not data_iterator:
            wrapped = self._streams[is_training].wrap(data_iterator)
            # Only the latest is kept: between steps a wrapped iterator holds nothing back.
            self._wrapped[is_training] = (data_iterator, wrapped)
        return wrapped

    def _enter_without_data(self) -> None:
        if self._is_without_data:
            return
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            raise LossAggError(
                "forward_step got no data iterator on tensor-parallel rank 0 of the chunk that "
                "computes the loss, where tokens are counted. Give this rank its data; other "
                "tensor-parallel ranks may have None."
            )
        for stream in self._streams.values():
            stream.wrap(None)
        self._is_without_data = True


def training_num_microbatches() -> int:
    """M of a training step, asked anew for each: `--rampup-batch-size` changes it."""
    module = "megatron.core.num_microbatches_calculator"
    return megatron(module, "get_num_microbatches")()


def evaluation_num_microbatches(num_microbatches: NumMicrobatches) -> int:
    """What `evaluate` of Megatron-LM runs; without its arguments the number for training."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None:
        return num_microbatches() if callable(num_microbatches) else num_microbatches
    batch_size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    micro_batch_size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    num_peers = args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
    return batch_size // (micro_batch_size * num_peers)
