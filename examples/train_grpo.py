"""The main job: GRPO on the task `count`, sampled and trained through one Megatron-Core pipeline.

    python examples/train_grpo.py                          PP=2 x DP=2, started here, on the CPU
    python examples/train_grpo.py --vpp 2 --set model.num_layers=4
    python examples/train_grpo.py --compare                four aggregation modes x three seeds
    torchrun --nproc-per-node 8 examples/train_grpo.py --dp 4            on GPUs; see launch/

Everything is in a YAML file (--config); flags override it. A run leaves in its folder the metrics
(metrics.jsonl, tensorboard/), a picture (training.png) and a checkpoint to go on from (--resume).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from grpo import cli


def main() -> int:
    """Run the command; returns the exit code."""
    parser = cli.make_parser(
        "Train a small GPT with GRPO to say a digit as often as asked.", "grpo_count.yaml"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train in each of four aggregation modes, and draw them side by side",
    )
    parser.add_argument(
        "--num-seeds", type=int, metavar="N", help="of --compare: runs per mode (default: 3)"
    )
    arguments = parser.parse_args()

    from grpo.comparison import MODE_OPTIONS, run_comparison
    from grpo.config import GrpoConfig
    from grpo.config_file import load_config
    from grpo.jobs import run_online
    from grpo.run_folder import open_comparison_folder

    def load() -> GrpoConfig:
        cli.import_modes(arguments)
        suffix = "_compare" if arguments.compare else ""
        file = cli.config_file_of(arguments, suffix)
        overrides = cli.overrides_of(arguments)
        useless = [option for option in MODE_OPTIONS if option in overrides]
        if arguments.compare and useless:
            raise ValueError(f"--compare sets {', '.join(useless)}: leave it to that.")
        config = load_config(GrpoConfig, file, overrides)
        return replace(config, name=config.name.removesuffix(suffix) + suffix)

    if arguments.compare:
        return cli.run_command(
            load,
            run_comparison,
            arguments.out,
            resume=arguments.resume,
            open_folder=partial(open_comparison_folder, num_seeds=arguments.num_seeds),
            subject="the policy loss in four modes",
        )
    return cli.run_command(load, run_online, arguments.out, resume=arguments.resume)


# Ranks that are started here import this file: they must not start the job again.
if __name__ == "__main__":
    cli.exit_with(main)
