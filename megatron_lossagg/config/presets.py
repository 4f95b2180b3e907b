"""Named options that reproduce what a paper or a host framework computes, and for which release.

A preset is a row of `PRESETS`: the options of `LossAggConfig` that it stands for, what it
reproduces, and what remains for the caller. Each is compared with the formula of its source in
tests/unit/test_presets.py, and with the host's own function in tests/hosts/test_presets_*.py.

    LossAggConfig.preset("dr_grpo", loss_scale_factor=4096)

What a preset sets is fixed; other options of `LossAggConfig` can be added. Names of algorithms say
how token losses are *aggregated*; the token loss itself (clipping, ratios) is the caller's.

Beside `terms` a preset gives each term what the term does not say:

    preset: dr_grpo
    loss_scale_factor: 4096
    terms:
      - name: policy                  # all of the preset: its mode, norm_semantics, B, and L
      - {name: kl, loss_agg_mode: token-mean, coefficient: 0.1}     # sequence_count alone

A term that names another mode has of the preset what that mode reads: `sequence_count` always,
`norm_semantics` and L (`loss_scale_factor`) if it is `seq-mean-token-sum-norm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_lossagg.modes.options import OPTION_NAMES
from megatron_lossagg.modes.registry import get_mode
from megatron_lossagg.modes.unread import BY_MODE

_NORM_MODE = "seq-mean-token-sum-norm"
_VERL_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    _NORM_MODE,
)
# Options that each term has for itself.
_OF_A_TERM = ("loss_agg_mode", *OPTION_NAMES)
_NORM_LENGTH = (
    "the constant that every sum over tokens is divided by, usually the maximum response length: "
    "the width of a Megatron mask includes the prompt and is no substitute"
)


@dataclass(frozen=True)
class Preset:
    """One row of the table.

    Attributes:
        options: `LossAggConfig` options that it sets; read-only.
        reproduces: the paper, or the host's release and file.
        formula: J in symbols of `modes`.
        caller_adds: what the caller has to provide besides.
        required: option without which there is no preset -> what it is.
        modes: the values of `loss_agg_mode` that may replace the one in `options`.
    """

    options: Mapping[str, Any]
    reproduces: str
    formula: str
    caller_adds: str
    required: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dapo": Preset(
            {"loss_agg_mode": "token-mean"},
            "DAPO as trained: verl's DAPO recipe (loss_agg_mode=token-mean) with global counts, "
            "TRL 1.16 loss_type=dapo with steps_per_generation equal to the gradient accumulation",
            "sum(m l) / T",
            "nothing; but the paper (Yu et al. 2025, arXiv:2503.14476) averages over the tokens of "
            "each prompt's group: loss_agg_mode=unit-mean-token-mean, unit_ids = prompt",
        ),
        "grpo": Preset(
            {"loss_agg_mode": "seq-mean-token-mean", "sequence_count": "nominal"},
            "the objective of GRPO (Shao et al. 2024, arXiv:2402.03300) with groups of one size; "
            "TRL 1.16 loss_type=grpo with microbatches of one size",
            "sum_s(sum_t(m l) / n_s) / B",
            "nothing",
        ),
        "dr_grpo": Preset(
            {
                "loss_agg_mode": _NORM_MODE,
                "norm_semantics": "seq-mean",
                "sequence_count": "nominal",
            },
            "the objective of Dr.GRPO (Liu et al. 2025, arXiv:2503.20783) in its authors' code "
            "(train_zero_math.py: masked_sum over generate_max_length, then the mean over rows)",
            "sum(m l) / (B L)",
            "loss_scale_factor; advantages that are not divided by their standard deviation",
            {"loss_scale_factor": _NORM_LENGTH},
        ),
        "gspo": Preset(
            {"loss_agg_mode": "seq-mean-token-mean", "sequence_count": "nominal"},
            "the objective of GSPO (Zheng et al. 2025, arXiv:2507.18071); verl 0.9.1 "
            "loss_mode=gspo with loss_agg_mode=seq-mean-token-mean, which verl 0.7 forces",
            "sum_s(sum_t(m l) / n_s) / B",
            "token_losses.gspo as the token loss",
        ),
        "cispo": Preset(
            {"loss_agg_mode": "token-mean"},
            "CISPO (MiniMax 2025, arXiv:2506.13585) over the global batch; TRL 1.16 "
            "loss_type=cispo with steps_per_generation equal to the gradient accumulation",
            "sum(m l) / T",
            "token_losses.cispo as the token loss",
        ),
        "verl-2026-01": Preset(
            {
                "loss_agg_mode": "token-mean",
                "norm_semantics": "sum",
                "sequence_count": "nominal",
            },
            "verl 0.7.0 with trainer.use_legacy_worker_impl=disable: agg_loss "
            "(trainer/ppo/core_algos.py) with the counts of workers/utils/losses.py; B is "
            "ppo_mini_batch_size * rollout.n. Its legacy workers, the default of that release, "
            "divide by the counts of each microbatch, which is no global objective",
            "by loss_agg_mode; norm mode: sum(m l) / L",
            "loss_agg_mode, if it is not verl's default token-mean; loss_scale_factor with "
            "seq-mean-token-sum-norm. That mode lacks dp_size in verl 0.7, so that DDP's mean made "
            "its gradient D times smaller: to get that too, pass D * L",
            modes=_VERL_MODES,
        ),
        "verl-2026-08": Preset(
            {
                "loss_agg_mode": "token-mean",
                "norm_semantics": "seq-mean",
                "sequence_count": "nominal",
            },
            "verl 0.9.1: agg_loss (trainer/ppo/core_algos.py) with the counts of "
            "workers/utils/losses.py; B is ppo_mini_batch_size * rollout.n",
            "by loss_agg_mode; norm mode: sum(m l) / (B L)",
            "loss_agg_mode, if it is not verl's default token-mean; loss_scale_factor with "
            "seq-mean-token-sum-norm",
            modes=(*_VERL_MODES, "token-sum"),
        ),
        "slime-rollout": Preset(
            {"loss_agg_mode": "unit-mean-token-mean", "sequence_count": "nominal"},
            "slime (2026-08, 0.3.1) without --calculate-per-token-loss: sum_of_sample_mean "
            "(backends/megatron_utils/cp_utils.py) with rollout_mask_sums, over "
            "step_global_batch_size rollouts, also those whose samples are all masked",
            "sum_u(sum_t(m l) / T_u) / U",
            "unit_ids = rollout of each sample, and num_units = rollouts of the step. slime "
            "keeps T_u of the masks before rejection sampling: put a rejection into the loss",
        ),
        "nemo-rl-token": Preset(
            {"loss_agg_mode": "token-mean"},
            "NeMo-RL (2026-08, 0.6) token_level_loss=true: masked_mean over global_valid_toks "
            "(algorithms/loss/loss_functions.py), without its 1e-8",
            "sum(m l) / T",
            "sample_mask in the microbatch",
        ),
        "nemo-rl-sequence": Preset(
            {"loss_agg_mode": "seq-mean-token-mean", "sequence_count": "nominal"},
            "NeMo-RL (2026-08, 0.6) token_level_loss=false: mean over tokens, then over "
            "global_valid_seqs, which counts the ones of sample_mask "
            "(algorithms/loss/loss_functions.py), without its 1e-8",
            "sum_s(sum_t(m l) / n_s) / B",
            "sample_mask in the microbatch",
        ),
        "trl-dr_grpo": Preset(
            {
                "loss_agg_mode": _NORM_MODE,
                "norm_semantics": "seq-mean",
                "sequence_count": "nominal",
            },
            "TRL 1.16 loss_type=dr_grpo (trainer/grpo_trainer.py _compute_loss): rows and "
            "max_completion_length divide, masked rows included; with microbatches of one size",
            "sum(m l) / (B L)",
            "loss_scale_factor = max_completion_length",
            {"loss_scale_factor": "TRL's max_completion_length"},
        ),
    }
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "bnpo": (
            "TRL's bnpo divides each device's sum by the valid tokens of its own batch, and "
            "averages that over devices and accumulation steps. A token's weight then depends on "
            "which rank and microbatch it lands in, so there is no objective of the global batch: "
            "another layout trains something else. Use 'dapo' (the mean over all tokens of the "
            "global batch), which it equals where every device's batch has as many valid tokens."
        )
    }
)


def preset_names() -> tuple[str, ...]:
    """The presets there are."""
    return tuple(PRESETS)


def preset_options(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a preset with those of the caller.

    Args:
        name: one of `preset_names()`.
        overrides: options of `LossAggConfig`. With `terms` (mappings, or `TermConfig`s, which are
            complete) the preset's options are those of the terms that do not say otherwise.

    Returns:
        Options by name, as `LossAggConfig` takes them.

    Raises:
        ValueError: an unknown preset; one that is no global objective; a required option is
            missing; or an option would change what the preset reproduces.
    """
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(f"preset {name!r}: {REFUSED[name]}")
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"Unknown preset {name!r}; expected one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    overrides = {k: v for k, v in overrides.items() if v is not None or k not in OPTION_NAMES}
    for option, fixed in preset.options.items():
        given = overrides.get(option, fixed)
        if given != fixed and not (option == "loss_agg_mode" and preset.modes):
            raise ValueError(
                f"preset {name!r} is {option}={fixed!r}, got {given!r}. Leave the option out, or "
                "the preset: LossAggConfig takes every option by itself."
            )
    mode = overrides.get("loss_agg_mode", preset.options["loss_agg_mode"])
    if preset.modes and mode not in preset.modes:
        raise ValueError(
            f"preset {name!r} has no loss_agg_mode={mode!r}; expected one of "
            f"{', '.join(preset.modes)}."
        )
    options = {**preset.options, **overrides}
    terms = options.get("terms")
    if isinstance(terms, Sequence) and not isinstance(terms, str) and terms:
        defaults = {key: options.pop(key) for key in _OF_A_TERM if key in options}
        options["terms"] = [_completed(term, defaults) for term in terms]
        in_its_mode = [t for t in options["terms"] if _has_mode(t, mode)]
        _check_required(name, preset, in_its_mode)
    else:
        _check_required(name, preset, [options])
        options = {k: v for k, v in options.items() if k in overrides or _is_read(k, mode)}
    return options


def _completed(term: Any, defaults: Mapping[str, Any]) -> Any:
    """A term with what the preset sets where the term is silent; what is no mapping as it is."""
    if not isinstance(term, Mapping):
        return term
    said = {key: value for key, value in term.items() if value is not None}
    mode = said.get("loss_agg_mode", defaults["loss_agg_mode"])
    return {k: v for k, v in defaults.items() if _is_read(k, mode)} | said


def _is_read(option: str, loss_agg_mode: str) -> bool:
    """Whether a preset sets it; B always: metrics and reports read it, whatever the mode."""
    if option not in BY_MODE:
        return True
    try:
        return get_mode(loss_agg_mode).reads(option)
    except ValueError:
        return False  # whoever takes the mode says what is wrong with it


def _has_mode(term: Any, mode: str) -> bool:
    return isinstance(term, Mapping) and term["loss_agg_mode"] == mode


def _check_required(name: str, preset: Preset, aggregations: list[dict[str, Any]]) -> None:
    for option, meaning in preset.required.items():
        if any(options.get(option) is None for options in aggregations):
            raise ValueError(f"preset {name!r} needs {option}: {meaning}.")
