"""Run `pretrain()` of Megatron-LM, unmodified, on a CPU rank of a pool with megatron-core 0.19.2.

The model is the bench's scalar model and the token losses are prescribed, so what its log should
say is plain arithmetic. Nothing of Megatron-LM is replaced but the compilation of its C++ index
builder: it trains, evaluates and logs by functions of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions

from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.model.scalar_model import build_scalar_chunks

RELEASE = "0.19.2"
# A local transformer without fusions, and nothing that needs a device or a file.
_ARGUMENTS = """
    --num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 64
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --attention-dropout 0 --hidden-dropout 0 --disable-jit-fuser
    --tokenizer-type NullTokenizer --vocab-size 31 --dataloader-type external
    --distributed-backend gloo --lr 0 --clip-grad 0 --log-interval 1 --eval-interval 1000
""".split()


@dataclass(frozen=True)
class Pretraining:
    """What `pretrain` is to do.

    Attributes:
        layout: sizes of the groups, and the number of microbatches of a training step.
        per_token: Megatron's calculate_per_token_loss.
        training: a `GlobalBatch` per training step.
        evaluation: a `GlobalBatch` per evaluation batch, after the training.
        arguments: more arguments of the command line.
    """

    layout: Layout
    per_token: bool
    training: tuple
    evaluation: tuple = ()
    arguments: tuple[str, ...] = ()


class Log:
    """A TensorBoard writer that keeps what is written."""

    def __init__(self):
        self.scalars: dict[str, list[float]] = {}

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append(float(value))

    def add_text(self, *args, **kwargs):
        """Arguments; not looked at."""

    def flush(self):
        """Nothing is held back."""


def pretrain(case: Pretraining, forward_step_of, on_setup=None):
    """Communicates over the world group: train, evaluate, and give what this rank has logged.

    Args:
        case: what to do.
        forward_step_of: (config of the model) -> forward_step.
        on_setup: called with the chunks in DDP on every rank, before the training starts: what
            `post_wrap_hooks` of Megatron-LM's own model configs are.

    Returns:
        name -> what the TensorBoard writer got, in order. Every rank has a writer here; ranks
        before the last stage have no losses to write.
    """
    with _environment_of(case):
        from megatron.training import global_vars, training
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        stages = build_scalar_chunks(
            case.layout, wrap_with_ddp=False, calculate_per_token_loss=case.per_token
        )
        try:
            args = parse_and_validate_args()
            log = global_vars._GLOBAL_TENSORBOARD_WRITER = Log()
            # As pretrain_gpt.py does; whether they are set decides on collectives.
            training.set_startup_timestamps(program_start=time.time(), main_entry=time.time())
            training.pretrain(
                pretrain_cfg_container_from_args(args, _ModelConfig(stages, on_setup)),
                _datasets_of(case),
                None,
                forward_step_of(stages[0].config),
            )
        finally:
            _forget(global_vars)
        return log.scalars


@dataclass(frozen=True)
class _ModelConfig:
    """What `pretrain` builds a model from; Megatron-LM's own are for its own models."""

    stages: list
    on_setup: Callable[[list], object] | None

    def get_builder_cls(self):
        return _ModelBuilder


@dataclass(frozen=True)
class _ModelBuilder:
    model_config: _ModelConfig

    def build_distributed_models(
        self, *, pg_collection, ddp_config, wrap_with_ddp, data_parallel_random_init, **unused
    ):
        from megatron.training.models import dist_utils

        stages = self.model_config.stages
        for stage in stages:
            stage.pg_collection = pg_collection
        chunks = dist_utils.prepare_existing_model_chunks_for_distributed_training(
            stages,
            stages[0].config,
            pg_collection,
            ddp_config=ddp_config,
            wrap_with_ddp=wrap_with_ddp,
            data_parallel_random_init=data_parallel_random_init,
        )
        if self.model_config.on_setup is not None:
            self.model_config.on_setup(chunks)
        return chunks


def _datasets_of(case):
    """The provider of `pretrain`: iterators over this rank's microbatches."""

    def provide(num_samples, vp_stage=None):
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        training, evaluation = (
            [part for batch in batches for part in batch.microbatches(rank)]
            for batches in (case.training, case.evaluation)
        )
        return iter(training), iter(evaluation), None

    provide.is_distributed = True
    return provide


@contextlib.contextmanager
def _environment_of(case):
    """What Megatron-LM reads of its process, and asks of a GPU that the bench's shim leaves out."""
    if not hasattr(typing, "override"):  # new in Python 3.12, where megatron.training takes it
        typing.override = typing_extensions.override
    from megatron.core.datasets import utils

    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        mock.patch.object(sys, "argv", ["pretrain", *_ARGUMENTS, *_sizes(case), *case.arguments]),
        mock.patch.dict(os.environ, place),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(utils, "compile_helpers", lambda: None),
        contextlib.redirect_stdout(io.StringIO()),  # some thousand lines of arguments and timers
    ):
        yield


def _sizes(case):
    layout, batches = case.layout, case.training + case.evaluation
    [(rows, width)] = {shape for batch in batches for shape in batch.shapes(0)}
    options = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "seq-length": width,
        "micro-batch-size": rows,
        "global-batch-size": rows * layout.num_microbatches * layout.dp,
        "train-iters": len(case.training),
        "eval-iters": len(case.evaluation),
    }
    per_token = ["--calculate-per-token-loss"] if case.per_token else []
    return [word for name, n in options.items() for word in (f"--{name}", str(n))] + per_token


def _forget(global_vars):
    """The globals of a run, but not the process groups, which are the bench's."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    global_vars.destroy_global_vars()
    global_vars.unset_global_variables()
    destroy_rerun_state_machine()
