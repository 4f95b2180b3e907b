#!/usr/bin/env bash
# The GRPO example under torchrun: on one node, or the same command on each of several.
#
#   bash examples/launch/torchrun.sh --pp 2 --dp 4                     one node with 8 GPUs
#   NNODES=4 MASTER_ADDR=node0 bash examples/launch/torchrun.sh \
#       --pp 2 --dp 16 --micro-batch-size 16 --out /shared/run         on each of 4 nodes
#
# Arguments go to train_grpo.py. tp x pp x dp x cp must be NNODES x GPUS_PER_NODE. Without GPUs the
# ranks use gloo on the CPU: GPUS_PER_NODE=4 starts the default layout.
#
# --out must be a folder that all nodes see: the ranks of different nodes write one checkpoint.
# Ctrl-C lets the current step end, writes a checkpoint and stops. torchrun waits 30 seconds for it:
# if steps are longer, `touch DIR/STOP` asks for the same and gives it the time it takes.
set -euo pipefail

NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
PYTHON=${PYTHON:-python}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NNODES" \
    --nproc-per-node "$GPUS_PER_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
    examples/train_grpo.py "$@"
