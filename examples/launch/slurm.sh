#!/usr/bin/env bash
# The GRPO example under Slurm: one torchrun per node.
#
#   sbatch examples/launch/slurm.sh --pp 2 --dp 16 --micro-batch-size 16
#
# Arguments go to train_grpo.py. tp x pp x dp x cp must be nodes x GPUs per node: here 4 x 8.
# Before the time limit, Slurm sends SIGTERM: the ranks end their step, write a checkpoint and stop.
# Submit again with --resume to go on. Submit from the project's folder, on a file system that all
# nodes see: the ranks of different nodes write one checkpoint.
#SBATCH --job-name=grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=slurm-%j.out
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-29500}
export NNODES=$SLURM_JOB_NUM_NODES
export GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-8}

# One folder for all, whichever job of a chain of jobs this is.
srun bash "$SLURM_SUBMIT_DIR/examples/launch/torchrun.sh" --out "$SLURM_SUBMIT_DIR/runs/slurm" "$@"
