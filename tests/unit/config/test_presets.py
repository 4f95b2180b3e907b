"""Presets beside the formulas of their sources, computed rank by rank as each host does."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from pathlib import Path

import pytest
import torch
from one_process import make_microbatch, model_config, run_step
from typer.testing import CliRunner

from megatron_lossagg import (
    LossAggConfig,
    LossAggregator,
    ParallelGroups,
    count_global_batch,
    token_weights,
)
from megatron_lossagg.cli.app import app
from megatron_lossagg.config.presets import PRESETS, preset_names
from megatron_lossagg.config.term_config import TermConfig
from megatron_lossagg.modes import ModeSpec

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "presets"
L = 5
NORM = "seq-mean-token-sum-norm"
# [rank][microbatch][row]: a fully masked row, a microbatch of them, holes, one row per length.
MASKS = [
    [[[1, 1, 1, 1], [1, 0, 1, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]],
    [[[1, 0, 0, 0], [0, 0, 0, 0]], [[0, 1, 1, 1], [1, 1, 0, 0]]],
]
LOSSES = [
    [
        [[0.3 * (r + 1) + 0.7 * m - 0.4 * s + 0.11 * t**2 for t in range(4)] for s in range(2)]
        for m in range(2)
    ]
    for r in range(2)
]
ROLLOUTS = [[[0, 0], [1, 2]], [[3, 1], [2, 3]]]  # 1 is fully masked, 2 and 3 straddle
SAMPLE_MASK = [[[1, 1], [1, 0]], [[1, 1], [0, 1]]]  # of NeMo-RL
NUM_ROWS, NUM_TOKENS, D, M = 8, 12, 2, 2


def token_sum(row_losses, row_mask):
    return sum(x for x, m in zip(row_losses, row_mask, strict=True) if m)


def rows_of(rank, microbatch):
    """(sum over valid tokens, valid tokens) of each row."""
    rows = zip(LOSSES[rank][microbatch], MASKS[rank][microbatch], strict=True)
    return [(token_sum(x, m), sum(m)) for x, m in rows]


def ddp_mean(loss_of_microbatch):
    """What the optimizer gets where DDP averages over ranks: microbatches add up."""
    ranks = [sum(loss_of_microbatch(r, m) for m in range(M)) for r in range(D)]
    return sum(ranks) / D


def verl(mode, release, num_seqs=NUM_ROWS):
    """Of agg_loss: (x M by the engine, / M by the schedule), x dp_size, / D by DDP."""

    def loss_of_microbatch(rank, microbatch):
        rows = rows_of(rank, microbatch)
        total = sum(x for x, _ in rows)
        if mode == "token-mean":
            loss = total / NUM_TOKENS * D
        elif mode == "token-sum":
            loss = total * D
        elif mode == "seq-mean-token-sum":
            loss = total / num_seqs * D
        elif mode == "seq-mean-token-mean":
            loss = sum(x / n for x, n in rows if n) / num_seqs * D
        elif release == "0.7":  # no dp_size: see the preset's `caller_adds`
            loss = total / L
        else:
            loss = total / num_seqs * D / L
        return loss * M / M

    return ddp_mean(loss_of_microbatch)


def trl(loss_type):
    """Of GRPOTrainer._compute_loss: a mean over each device's microbatch, / accumulation steps."""

    def loss_of_microbatch(rank, microbatch):
        rows = rows_of(rank, microbatch)
        if loss_type == "grpo":
            return sum(x / max(n, 1) for x, n in rows) / len(rows) / M
        if loss_type == "dr_grpo":
            return sum(x for x, _ in rows) / (len(rows) * L) / M
        if loss_type == "bnpo":
            return sum(x for x, _ in rows) / max(1, sum(n for _, n in rows)) / M
        # dapo, cispo: num_items_in_batch / num_processes, steps_per_generation = accumulation
        return sum(x for x, _ in rows) / (NUM_TOKENS / D)

    return ddp_mean(loss_of_microbatch)


def dr_grpo_authors():
    """masked_sum over a constant, the mean over the rows of a microbatch, / accumulation steps."""
    return ddp_mean(lambda r, m: sum(x / L for x, _ in rows_of(r, m)) / len(rows_of(r, m)) / M)


def slime():
    """sum_of_sample_mean x M / rollouts x D; Megatron's schedule / M; DDP's mean over D."""
    mask_sums = [0] * 4
    for r in range(D):
        for m in range(M):
            for rollout, (_, n) in zip(ROLLOUTS[r][m], rows_of(r, m), strict=True):
                mask_sums[rollout] += n

    def loss_of_microbatch(r, m):
        of_rows = zip(ROLLOUTS[r][m], rows_of(r, m), strict=True)
        return sum(x / max(mask_sums[u], 1) for u, (x, _) in of_rows) * M / 4 * D / M

    return ddp_mean(loss_of_microbatch)


def nemo_rl(token_level, epsilon=0.0):
    """masked_mean by masked_mean; per-token regime: ranks add up, and nothing divides."""
    valid_seqs = sum(sum(mask) for rank in SAMPLE_MASK for mask in rank)
    pairs = [(r, m, s) for r in range(D) for m in range(M) for s in range(2)]
    kept = [(rows_of(r, m)[s], SAMPLE_MASK[r][m][s]) for r, m, s in pairs]
    if token_level:
        valid_toks = sum(n for (_, n), mask in kept if mask)
        return sum(x for (x, _), mask in kept if mask) / (valid_toks + epsilon)
    means = [(x / (n + epsilon) if n or epsilon else 0.0, mask) for (x, n), mask in kept]
    return sum(mean for mean, mask in means if mask) / (valid_seqs + epsilon)


def ours(config, *, sample_mask=False):
    """J of the preset, from counts and weights of the global batch."""
    masks = torch.tensor(MASKS).flatten(0, 1).unbind()
    losses = torch.tensor(LOSSES, dtype=torch.float64).flatten(0, 1).unbind()
    unit_ids = samples = [None] * len(masks)
    if config.loss_agg_mode.startswith("unit"):
        unit_ids = torch.tensor(ROLLOUTS).flatten(0, 1).unbind()
    if sample_mask:
        samples = torch.tensor(SAMPLE_MASK).flatten(0, 1).unbind()
    counts = count_global_batch(
        masks,
        ParallelGroups.single_process(),
        sample_masks=samples,
        unit_ids=None if unit_ids[0] is None else unit_ids,
        num_units=4,
    )
    names = ("loss_agg_mode", "loss_scale_factor", "norm_semantics", "sequence_count")
    options = {name: getattr(config, name) for name in names}
    return sum(
        (
            token_weights(
                mask,
                counts=counts,
                unit_ids=of_unit,
                sample_mask=real,
                weight_dtype=torch.float64,
                **options,
            )
            * loss
        )
        .sum()
        .item()
        for mask, loss, of_unit, real in zip(masks, losses, unit_ids, samples, strict=True)
    )


VERL_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", NORM)
CASES = [
    ("dapo", {}, lambda: trl("dapo")),
    ("dapo", {}, lambda: verl("token-mean", "0.9")),
    ("grpo", {}, lambda: trl("grpo")),
    ("gspo", {}, lambda: verl("seq-mean-token-mean", "0.9")),
    ("cispo", {}, lambda: trl("cispo")),
    ("dr_grpo", {"loss_scale_factor": L}, dr_grpo_authors),
    ("trl-dr_grpo", {"loss_scale_factor": L}, lambda: trl("dr_grpo")),
    ("slime-rollout", {}, slime),
    *(("verl-2026-01", {"loss_agg_mode": mode}, mode) for mode in VERL_MODES),
    *(("verl-2026-08", {"loss_agg_mode": mode}, mode) for mode in (*VERL_MODES, "token-sum")),
]


@pytest.mark.parametrize(("name", "overrides", "host"), CASES)
def test_parity(name, overrides, host):
    """1e-12 from the host's sum, on a batch where every other choice gives another number."""
    if name.startswith("verl"):
        mode, release = host, "0.7" if name.endswith("01") else "0.9"
        factor = D * L if (mode, release) == (NORM, "0.7") else L
        overrides = overrides | ({"loss_scale_factor": factor} if mode == NORM else {})
        expected = verl(mode, release)
    else:
        expected = host()
    config = LossAggConfig.preset(name, **overrides)
    assert ours(config) == pytest.approx(expected, rel=1e-12)
    # Valid counts are another number wherever B or U divides.
    if config.sequence_count == "nominal" and config.loss_agg_mode not in (
        "token-mean",
        "token-sum",
    ):
        if (config.loss_agg_mode, config.norm_semantics) != (NORM, "sum"):
            other = dataclasses.replace(config, sequence_count="valid")
            assert ours(other) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["nemo-rl-token", "nemo-rl-sequence"])
def test_nemo_rl(name):
    """1e-12 without the 1e-8 that NeMo-RL adds to its counts, 1e-8 with it."""
    value = ours(LossAggConfig.preset(name), sample_mask=True)
    token_level = name.endswith("token")
    assert value == pytest.approx(nemo_rl(token_level), rel=1e-12)
    assert value == pytest.approx(nemo_rl(token_level, epsilon=1e-8), rel=2e-8)


def test_bnpo_is_no_global_objective(monkeypatch):
    """The reason for its refusal, in numbers: two rows that change places change it."""
    with pytest.raises(ValueError, match="no objective of the global batch: .* Use 'dapo'"):
        LossAggConfig.preset("bnpo")
    before = {loss_type: trl(loss_type) for loss_type in ("bnpo", "dapo")}
    for name in ("LOSSES", "MASKS"):
        swapped = copy.deepcopy(globals()[name])
        swapped[0][0][1], swapped[1][0][1] = swapped[1][0][1], swapped[0][0][1]
        monkeypatch.setitem(globals(), name, swapped)
    assert trl("bnpo") != pytest.approx(before["bnpo"], rel=1e-3)
    assert trl("dapo") == pytest.approx(before["dapo"], rel=1e-12)


def test_names():
    """What is promised, and each row says what it reproduces and what is left."""
    assert set(preset_names()) == {
        *("dapo", "grpo", "dr_grpo", "gspo", "cispo", "verl-2026-01", "verl-2026-08"),
        *("slime-rollout", "nemo-rl-token", "nemo-rl-sequence", "trl-dr_grpo"),
    }
    for preset in PRESETS.values():
        assert preset.reproduces and preset.formula and preset.caller_adds
        with pytest.raises(TypeError):
            preset.options["loss_agg_mode"] = "token-sum"


@pytest.mark.parametrize("name", preset_names())
def test_yaml_files(name):
    """configs/presets/NAME.yaml says what it reproduces, is the preset, and warns of nothing."""
    path = CONFIGS / f"{name}.yaml"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = LossAggConfig.from_yaml(path)
    placeholders = {option: getattr(config, option) for option in PRESETS[name].required}
    assert config == LossAggConfig.preset(name, **placeholders)
    text = path.read_text(encoding="utf-8")
    assert re.match(r"# \w", text)
    assert all(f"{option}:" in text for option in PRESETS[name].options)
    assert all(re.search(f"{option}: .*# a placeholder", text) for option in placeholders)


def test_no_other_yaml_files():
    """A file for each preset and none besides."""
    assert {path.stem for path in CONFIGS.iterdir()} == set(preset_names())


def test_preset_as_a_key(tmp_path):
    """In YAML and mappings, with further options, at the top or under `loss_agg`."""
    path = tmp_path / "a.yaml"
    path.write_text("loss_agg: {preset: dapo, weights_key: loss_mask}\n", encoding="utf-8")
    expected = LossAggConfig(loss_agg_mode="token-mean", weights_key="loss_mask")
    assert LossAggConfig.from_yaml(path) == expected
    assert LossAggConfig.from_dict({"preset": "dapo", "weights_key": "loss_mask"}) == expected
    config = LossAggConfig.preset("dr_grpo", loss_scale_factor=4096, contract="measure")
    assert LossAggConfig.from_dict(config.to_dict()) == config
    assert config.contract == "measure" and config.norm_semantics == "seq-mean"
    same = LossAggConfig.preset("grpo", loss_agg_mode="seq-mean-token-mean")
    assert same == LossAggConfig.preset("grpo")
    path.write_text("preset: dap\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: Unknown preset 'dap'; .* dapo"):
        LossAggConfig.from_yaml(path)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("dapo2", {}, "Unknown preset 'dapo2'; expected one of dapo, grpo"),
        (None, {}, "Unknown preset None"),
        (["dapo"], {}, r"Unknown preset \['dapo'\]"),
        ("dr_grpo", {}, "'dr_grpo' needs loss_scale_factor: .* maximum response length"),
        ("trl-dr_grpo", {"loss_scale_factor": None}, "needs loss_scale_factor: TRL's max_compl"),
        ("dapo", {"loss_agg_mode": "token-sum"}, "'dapo' is loss_agg_mode='token-mean', got 'tok"),
        ("grpo", {"sequence_count": "valid"}, "'grpo' is sequence_count='nominal', got 'valid'"),
        ("verl-2026-01", {"loss_agg_mode": "token-sum"}, "has no loss_agg_mode='token-sum'; exp"),
        ("verl-2026-08", {"loss_agg_mode": "unit-mean-token-mean"}, "expected one of token-mean"),
        ("verl-2026-08", {"loss_agg_mode": NORM}, "needs loss_scale_factor"),
        ("verl-2026-08", {"norm_semantics": "sum"}, "is norm_semantics='seq-mean', got 'sum'"),
        ("dr_grpo", {"terms": [{"name": "policy"}]}, "'dr_grpo' needs loss_scale_factor: .* max"),
        ("dapo", {"weight_key": "x"}, r"unknown option\(s\) weight_key; known ones: preset, loss_"),
    ],
)
def test_mistakes(name, overrides, message):
    """Each says what was passed and what to do."""
    with pytest.raises(ValueError, match=message):
        LossAggConfig.preset(name, **overrides)


def test_modes_prints_them():
    """`megatron-lossagg modes` lists the presets, and why bnpo is none."""
    result = CliRunner().invoke(app, ["modes"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert all(name in result.stdout for name in preset_names())
    assert "bnpo: refused." in result.stdout and "length-power-A" in result.stdout


def test_slime_rollout_in_a_step():
    """A plan of four microbatches: its value is slime's, and its checksum is told by the counts."""
    config = LossAggConfig.preset("slime-rollout", weight_dtype="float64")
    aggregator = LossAggregator.from_config(
        lambda output_tensor, microbatch: output_tensor,
        config,
        model_config(),
        groups=ParallelGroups.single_process(),
    )
    microbatches = [
        make_microbatch(LOSSES[r][m], MASKS[r][m], unit_ids=torch.tensor(ROLLOUTS[r][m]))
        for r in range(D)
        for m in range(M)
    ]
    step = aggregator.begin_step(microbatches, num_units=4)
    reports = run_step(step)
    step.validate()
    assert step.report(reports)["loss"] == pytest.approx(slime(), rel=1e-12)
    assert config.main_spec.checksum(step.counts).item() == 3 / 4


def test_preset_beside_terms():
    """What a term does not say is the preset's; one with another mode has what that mode reads."""
    config = LossAggConfig.from_dict(
        {
            "preset": "dr_grpo",
            "loss_scale_factor": "4e0",
            "weight_dtype": "float64",
            "terms": [
                {"name": "policy", "loss_scale_factor": None},
                {"name": "kl", "loss_agg_mode": "token-mean", "coefficient": 0.1},
                {"name": "value", "loss_agg_mode": "seq-mean-token-mean"},
                {"name": "aux", "loss_agg_mode": NORM, "norm_semantics": "sum"},
                {"name": "entropy", "loss_scale_factor": 8, "sequence_count": "valid"},
            ],
        }
    )
    assert [term.with_loss_fn(print).weighting.spec for term in config.terms] == [
        ModeSpec(NORM, loss_scale_factor=4, norm_semantics="seq-mean", sequence_count="nominal"),
        ModeSpec("token-mean", sequence_count="nominal"),
        ModeSpec("seq-mean-token-mean", sequence_count="nominal"),
        ModeSpec(NORM, loss_scale_factor=4, norm_semantics="sum", sequence_count="nominal"),
        ModeSpec(NORM, loss_scale_factor=8, norm_semantics="seq-mean", sequence_count="valid"),
    ]
    assert LossAggConfig.from_dict(config.to_dict()) == config
    aggregator = LossAggregator.from_config(
        dict.fromkeys((term.name for term in config.terms), lambda output, microbatch: output),
        config,
        model_config(),
        groups=ParallelGroups.single_process(),
    )
    mask = [[1, 1, 1, 0], [0, 0, 0, 0]]  # T = 3, B = 2 rows, one of them valid
    [microbatch] = aggregator.begin_step([make_microbatch([[1.0] * 4] * 2, mask)]).microbatches
    of_a_token = [microbatch[key][0, 0].item() for key in aggregator.weights_keys]
    expected = [1 / (2 * 4), 1 / 3, 1 / (2 * 3), 1 / 4, 1 / (1 * 8)]
    assert of_a_token == pytest.approx(expected, rel=1e-15)


def test_a_preset_whose_mode_is_chosen_beside_terms():
    """The mode at the top is that of terms without one; L waits for those that read it."""
    config = LossAggConfig.preset(
        "verl-2026-08",
        loss_agg_mode="seq-mean-token-mean",
        loss_scale_factor=16,
        terms=[
            {"name": "policy"},
            {"name": "norm", "loss_agg_mode": NORM},
            TermConfig(name="built", loss_agg_mode="token-sum"),  # complete: nothing is added
        ],
    )
    assert [term.with_loss_fn(print).weighting.spec for term in config.terms] == [
        ModeSpec(
            "seq-mean-token-mean",
            loss_scale_factor=16,
            norm_semantics="seq-mean",
            sequence_count="nominal",
        ),
        ModeSpec(NORM, loss_scale_factor=16, norm_semantics="seq-mean", sequence_count="nominal"),
        ModeSpec("token-sum"),
    ]
    own_length = [{"name": "policy", "loss_scale_factor": 4}]  # nobody else needs L
    assert LossAggConfig.preset("dr_grpo", terms=own_length).main_spec.loss_scale_factor == 4
    others = [{"name": "kl", "loss_agg_mode": "token-mean"}]
    assert LossAggConfig.preset("dr_grpo", terms=others).main_spec.loss_scale_factor is None
    for wrong in ("policy", {"name": "policy"}, ["policy"]):
        with pytest.raises(
            ValueError, match=r"terms must be a list|terms\[0\]: expected a mapping"
        ):
            LossAggConfig.preset("dapo", terms=wrong)
