"""LossAggConfig: one frozen dataclass, one YAML section, every mistake named."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch
from one_process import make_microbatch, model_config, run_step

from megatron_lossagg import LossAggConfig, LossAggregator, ParallelGroups
from megatron_lossagg.config.options import LossAggOptions

NON_DEFAULTS = {
    "contract": "measure",
    "denominators": "deferred",
    "checks": "skipped",
    "report_counts": True,
    "compile": True,
    "masks_are_cp_sliced": True,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "loss_scale_factor": 512,
    "norm_semantics": "seq-mean",
    "sequence_count": "nominal",
    "cp_gradient": "gathered",
    "returns": "loss",
    "weights_key": "loss_mask",
    "weight_dtype": "float64",
}


def yaml_file(folder, text):
    path = folder / "algorithm.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "values",
    [
        NON_DEFAULTS,
        {"loss_agg_mode": "token-mean"},
        NON_DEFAULTS | {"loss_scale_factor": np.float32(512)},
    ],
)
def test_yaml_round_trip(tmp_path, values):
    """What is written is read back equal, at the top level or under `loss_agg`."""
    config = LossAggConfig(**values)
    path = tmp_path / "a.yaml"
    config.to_yaml(path)
    assert LossAggConfig.from_yaml(path) == config
    indented = "".join(f"  {line}\n" for line in path.read_text().splitlines())
    nested = yaml_file(tmp_path, f"trainer: {{steps: 3}}\nloss_agg:\n{indented}")
    assert LossAggConfig.from_yaml(str(nested)) == config
    assert LossAggConfig.from_dict(config.to_dict()) == config


def test_every_option_reaches_the_aggregator():
    """Names and defaults are those of LossAggregator's arguments; none is dropped on the way."""
    arguments = LossAggConfig(**NON_DEFAULTS).aggregator_arguments()
    assert arguments == NON_DEFAULTS
    assert LossAggOptions(**arguments).torch_weight_dtype is torch.float64
    parameters = inspect.signature(LossAggregator).parameters
    for field in dataclasses.fields(LossAggConfig):
        default = parameters[field.name].default
        if field.name == "terms":
            assert field.default == () and default is None
        else:
            assert field.default == default


def test_from_config_builds_a_working_aggregator():
    """The value is that of the options in the file, not of the defaults."""
    config = LossAggConfig(
        loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=4, norm_semantics="seq-mean"
    )
    aggregator = LossAggregator.from_config(
        lambda output_tensor, microbatch: output_tensor,
        config,
        model_config(),
        groups=ParallelGroups.single_process(),
    )
    step = aggregator.begin_step([make_microbatch([[1.0, 2.0], [5.0, 9.0]], [[1, 1], [1, 0]])])
    assert step.report(run_step(step))["loss"] == pytest.approx((3 + 5) / 2 / 4)


def test_config_is_frozen_and_keyword_only():
    """A config is a value: it cannot drift after it was checked."""
    config = LossAggConfig(loss_agg_mode="token-mean")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.loss_agg_mode = "token-sum"
    with pytest.raises(TypeError):
        LossAggConfig("token-mean")
    assert hash(config) == hash(LossAggConfig(loss_agg_mode="token-mean"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "loss_agg_mode: token-mean\nloss_agg_mod: x\n2: y\n",
            r"option\(s\) 2, loss_agg_mod; known",
        ),
        ("norm_semantics: sum\n", "needs 'loss_agg_mode'"),
        ("", "expected a mapping of options, got NoneType"),
        ("- token-mean\n", "expected a mapping of options, got list"),
        ("loss_agg:\n", "expected a mapping of options, got NoneType"),
        ("loss_agg_mode: [token-mean\n", "expected ',' or ']'"),
        ("loss_agg_mode: tokenmean\n", "'tokenmean'; expected one of token-mean"),
        ("loss_agg_mode: [token-mean]\n", r"loss_agg_mode must be text, got \['token-mean'\]"),
        ("loss_agg_mode: seq-mean-token-sum-norm\n", "needs loss_scale_factor"),
        (
            "loss_agg_mode: seq-mean-token-sum-norm\nloss_scale_factor: 4k\n",
            "loss_scale_factor must be a number, got '4k' of type str",
        ),
        (
            "loss_agg_mode: token-mean\nloss_scale_factor: 0\n",
            "loss_scale_factor=0.0 cannot divide",
        ),
        ("loss_agg_mode: token-mean\nloss_scale_factor: true\n", "got True of type bool"),
        (
            "loss_agg_mode: token-mean\nloss_scale_factor: .nan\n",
            "must be a number, got nan of type float",
        ),
        (
            "loss_agg_mode: token-mean\nnorm_semantics: true\n",
            "norm_semantics must be text, got True of type bool",
        ),
        ("loss_agg_mode: token-mean\nsequence_count: rows\n", "sequence_count='rows' does not"),
        ("loss_agg_mode: token-mean\ncp_gradient: ring\n", "cp_gradient='ring' does not .* local"),
        ("loss_agg_mode: token-mean\nreturns: 3\n", "returns must be text, got 3 of type int"),
        ("loss_agg_mode: token-mean\nreturns: two\n", "returns='two' does not .* auto, loss"),
        ("loss_agg_mode: token-mean\nweight_dtype: float16\n", "'float16' does not .* float32"),
        (
            "loss_agg_mode: token-mean\nweight_dtype: [float32]\n",
            r"must be text, got \['float32'\]",
        ),
        (
            "loss_agg_mode: token-mean\nweights_key:\n",
            "weights_key must be text, got None of type NoneType",
        ),
        (
            "loss_agg_mode: token-mean\nweights_key: sample_mask\n",
            "weights_key='sample_mask' cannot",
        ),
        ("loss_agg_mode: token-mean\ncompile: maybe\n", "compile must be true or false, got 'may"),
        ("loss_agg_mode: token-mean\nreport_counts: 1\n", "report_counts must be true or false"),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path, text, message):
    """ValueError with the path in front, then the option, the value and what exists."""
    path = yaml_file(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        LossAggConfig.from_yaml(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_file_is_named(tmp_path):
    """The usual FileNotFoundError, with the path."""
    with pytest.raises(FileNotFoundError, match="nothing.yaml"):
        LossAggConfig.from_yaml(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("text", ["2e3", "2000", "'2e3'", "2000.0", "2.0e+3"])
def test_a_number_means_the_same_at_every_level(tmp_path, text):
    """PyYAML reads 2e3 as text: at the top, in a term, beside a preset and as an override."""
    mode = "loss_agg_mode: seq-mean-token-sum-norm"
    for written in (
        f"{mode}\nloss_scale_factor: {text}\n",
        f"terms: [{{name: a, {mode}, loss_scale_factor: {text}}}]\n",
        f"preset: dr_grpo\nloss_scale_factor: {text}\n",
    ):
        config = LossAggConfig.from_yaml(yaml_file(tmp_path, written))
        assert config.main_spec.loss_scale_factor == 2000.0
    preset = LossAggConfig.preset("dr_grpo", loss_scale_factor=text.strip("'"))
    assert preset.main_spec.loss_scale_factor == 2000.0


FLAGS = ("masks_are_cp_sliced", "report_counts", "compile")


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_written_as_text(flag):
    """A mapping's text is read; a constructor, for which every text is true, refuses it."""
    for text, expected in (("false", False), ("Off", False), ("no", False), ("yes", True)):
        config = LossAggConfig.from_dict({"loss_agg_mode": "token-mean", flag: text})
        assert getattr(config, flag) is expected
        assert getattr(LossAggConfig.preset("dapo", **{flag: text}), flag) is expected
        message = f"{flag} must be True or False, got '{text}' of type str"
        with pytest.raises(TypeError, match=message):
            LossAggConfig(loss_agg_mode="token-mean", **{flag: text})
        with pytest.raises(TypeError, match=message):
            LossAggregator(
                lambda output, microbatch: output,
                loss_agg_mode="token-mean",
                model_config=model_config(),
                **{flag: text},
            )


WRITTEN_BY_0_1_0 = """
loss_agg_mode: token-mean
loss_scale_factor: null
norm_semantics: sum
sequence_count: valid
cp_gradient: local
returns: auto
weights_key: loss_weights
weight_dtype: float32
masks_are_cp_sliced: false
contract: detect
denominators: counted
report_counts: false
compile: false
terms: []
"""


def test_files_of_the_first_release_load(tmp_path, recwarn):
    """What `to_yaml` of 0.1.0 wrote, every default spelled out: the same options, no warning."""
    config = LossAggConfig.from_yaml(yaml_file(tmp_path, WRITTEN_BY_0_1_0))
    assert config.main_spec == LossAggConfig(loss_agg_mode="token-mean").main_spec
    assert config.torch_weight_dtype is torch.float32
    LossAggregator.from_config(lambda output, microbatch: output, config)
    assert not recwarn.list
