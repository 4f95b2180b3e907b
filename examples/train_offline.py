"""Offline GRPO: train on recorded responses with rewards, byte by byte.

    python examples/train_offline.py rollouts.jsonl
    python examples/train_offline.py rollouts.jsonl --dp 1 --loss-agg-mode seq-mean-token-mean

The file has one JSON object a line, with prompt_id, prompt, response and reward; other keys are
left alone. Responses with the same prompt_id are compared with each other. Options, launch and what
a run leaves behind are those of `train_grpo.py`.
"""

from __future__ import annotations

from grpo import cli


def main() -> int:
    """Run the command; returns the exit code."""
    parser = cli.make_parser(
        "Train a small GPT with GRPO on recorded responses.", "grpo_offline.yaml"
    )
    parser.add_argument("data", help="JSONL file of responses; see the top of this script")
    arguments = parser.parse_args()

    from grpo.config import OfflineConfig
    from grpo.config_file import load_config
    from grpo.jobs import describe_data, run_offline
    from grpo.launch import is_first_process

    def load() -> OfflineConfig:
        cli.import_modes(arguments)
        overrides = cli.overrides_of(arguments) | {"data.path": arguments.data}
        config = load_config(OfflineConfig, cli.config_file_of(arguments), overrides)
        # Also finds a bad line before any rank has started.
        description = describe_data(config)
        if is_first_process():
            print(description, flush=True)
        return config

    return cli.run_command(load, run_offline, arguments.out, resume=arguments.resume)


# Ranks that are started here import this file: they must not start the job again.
if __name__ == "__main__":
    cli.exit_with(main)
