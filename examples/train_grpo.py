"""The main job: GRPO on the task `count`, sampled and trained through one Megatron-Core pipeline.

    python examples/train_grpo.py                          PP=2 x DP=2, started here, on the CPU
    python examples/train_grpo.py --vpp 2 --set model.num_layers=4
    torchrun --nproc-per-node 8 examples/train_grpo.py --dp 4            on GPUs; see launch/

Everything is in a YAML file (--config); flags override it. A run leaves in its folder the metrics
(metrics.jsonl, tensorboard/), a picture (training.png) and a checkpoint to go on from (--resume).
"""

from __future__ import annotations

from grpo import cli


def main() -> int:
    """Run the command; returns the exit code."""
    parser = cli.make_parser(
        "Train a small GPT with GRPO to say a digit as often as asked.", "grpo_count.yaml"
    )
    arguments = parser.parse_args()

    from grpo.config import GrpoConfig
    from grpo.config_file import load_config
    from grpo.jobs import run_online

    def load() -> GrpoConfig:
        return load_config(GrpoConfig, cli.config_file_of(arguments), cli.overrides_of(arguments))

    return cli.run_command(load, run_online, arguments.out, resume=arguments.resume)


# Ranks that are started here import this file: they must not start the job again.
if __name__ == "__main__":
    cli.exit_with(main)
