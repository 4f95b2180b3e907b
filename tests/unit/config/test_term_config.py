"""Terms: options, names and errors; in one process what the schedule does not change."""

from __future__ import annotations

import math

import pytest
import torch
from compiled_objectives import aggregator, microbatch_of, values_and_gradient
from one_process import fixture_f, make_microbatch, model_config, run_step

from megatron_lossagg import (
    GlobalCounts,
    LossAggConfig,
    LossAggError,
    LossAggregator,
    LossTerm,
    ParallelGroups,
)
from megatron_lossagg.config.term_config import LinearCoefficient, TermConfig


def losses(output, microbatch):
    return output


def make(terms, loss_fn=None, **options):
    options = {"model_config": model_config(), "groups": ParallelGroups.single_process(), **options}
    return LossAggregator(loss_fn, terms=terms, weight_dtype=torch.float64, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": ""}, ValueError, "name='' cannot name a term"),
        ({"name": "loss"}, ValueError, "'loss', which is the sum of all terms"),
        ({"loss_fn": None}, TypeError, "loss_fn must be callable, got NoneType"),
        ({"loss_agg_mode": "mean"}, ValueError, "Unknown loss_agg_mode 'mean'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, ValueError, "needs loss_scale_factor"),
        ({"coefficient": math.nan}, ValueError, "must be a finite number, .* got nan"),
        ({"coefficient": "0.1"}, ValueError, "must be a finite number, .* got '0.1'"),
        ({"coefficient": True}, ValueError, "must be a finite number, .* got True"),
        ({"mask_key": ""}, ValueError, "mask_key='' cannot name a field"),
        ({"metrics": ["x"]}, TypeError, "metrics must map names to normalisers"),
        ({"metrics": {"x": "mean"}}, ValueError, "'mean' does not exist; .* tokens, sequences"),
    ],
)
def test_wrong_terms(options, error, message):
    """What was passed and what exists, before any step."""
    arguments = {"name": "a", "loss_fn": losses, "loss_agg_mode": "token-mean", **options}
    with pytest.raises(error, match=message):
        LossTerm(**arguments)


@pytest.mark.parametrize(
    ("terms", "options", "error", "message"),
    [
        ([], {}, ValueError, "terms is empty"),
        ([losses], {}, TypeError, "must be LossTerm objects, got function"),
        (["a", "a"], {}, ValueError, r"share the name\(s\) a"),
        (["a"], {"loss_agg_mode": "token-mean"}, ValueError, "loss_agg_mode cannot be given with"),
        (["a"], {"metrics": {"x": "sum"}}, ValueError, "metrics cannot be given with terms"),
        (["a"], {"sequence_count": "nominal"}, ValueError, "sequence_count cannot be given"),
    ],
)
def test_wrong_objectives(terms, options, error, message):
    """Terms and the options of a single loss exclude each other; names are distinct."""
    terms = [LossTerm(t, losses, "token-mean") if isinstance(t, str) else t for t in terms]
    with pytest.raises(error, match=message):
        make(terms, **options)


def test_a_mask_that_is_missing():
    """A term's mask is a field of every microbatch."""
    aggregator = make([LossTerm("a", losses, "token-mean", mask_key="value_mask")])
    with pytest.raises(ValueError, match="Microbatch 0 has no 'value_mask'"):
        aggregator.begin_step(fixture_f(1))


def test_more_masks_than_the_vector_holds():
    """8 distinct masks are counted in one all-reduce; a ninth is refused."""
    terms = [LossTerm(f"t{i}", losses, "token-mean", mask_key=f"mask_{i}") for i in range(9)]
    mask = torch.ones(1, 2)
    fields = {f"mask_{i}": mask for i in range(9)}
    with pytest.raises(ValueError, match="9 distinct masks are counted, at most 8"):
        make(terms).begin_step([make_microbatch([[1.0, 2.0]], [[1, 1]], **fields)])


def test_terms_share_weights():
    """One weight tensor per distinct (mode, mask), under keys of their own; masks stay."""
    terms = [
        LossTerm("value", losses, "token-mean", mask_key="value_mask"),
        LossTerm("policy", losses, "token-mean"),
        LossTerm("entropy", losses, "token-mean", -0.01),
        LossTerm("kl", losses, "seq-mean-token-mean", 0.1),
    ]
    microbatch = make_microbatch([[1.0, 2.0, 3.0]], [[1, 1, 0]], value_mask=torch.ones(1, 3))
    [planned] = make(terms).begin_step([microbatch]).microbatches
    assert planned["loss_weights"].tolist() == [[0.5, 0.5, 0]]  # the main mask comes first
    assert planned["loss_weights_1"].tolist() == [[1 / 3] * 3]
    assert planned["loss_weights_2"].tolist() == [[0.5, 0.5, 0]]
    assert "loss_weights_3" not in planned and planned["value_mask"].shape == (1, 3)


def test_counts_of_every_mask():
    """A driver passes counts by mask; a missing one is named, nothing is guessed."""
    terms = [
        LossTerm("a", losses, "token-mean"),
        LossTerm("b", losses, "token-mean", mask_key="other"),
    ]
    microbatch = make_microbatch([[1.0, 2.0]], [[1, 1]], other=torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match=r"counts lacks the mask\(s\) other"):
        make(terms).begin_step([microbatch], counts=GlobalCounts(4, 2, 2))
    counts = {"loss_mask": GlobalCounts(4, 2, 2), "other": GlobalCounts(2, 2, 2)}
    step = make(terms).begin_step([microbatch], counts=counts)
    [planned] = step.microbatches
    assert planned["loss_weights"].tolist() == [[0.25, 0.25]]
    assert planned["loss_weights_1"].tolist() == [[0.5, 0]]
    with pytest.raises(TypeError, match="a mapping from mask_key to one, got dict"):
        make(terms).begin_step([microbatch], counts={"loss_mask": 4, "other": 2})


def test_a_schedule_needs_the_iteration():
    """Coefficients that follow the iteration are never guessed."""
    terms = [LossTerm("a", losses, "token-mean", lambda iteration: 0.5**iteration)]
    with pytest.raises(ValueError, match="has a schedule as coefficient, which needs the iter"):
        make(terms).begin_step(fixture_f(1))
    values = []
    for iteration in (0, 1, 2):
        step = make(terms).begin_step(fixture_f(1), iteration=iteration)
        values.append(step.report(run_step(step))["loss"])
    assert values == [pytest.approx(20 / 7 * 0.5**i, rel=1e-14) for i in (0, 1, 2)]
    bad = [LossTerm("a", losses, "token-mean", lambda iteration: math.inf)]
    with pytest.raises(ValueError, match="'a at iteration 3': the coefficient must be a finite"):
        make(bad).begin_step(fixture_f(1), iteration=3)


def test_wrapped_streams_ask_for_the_iteration():
    """The function is asked at every step."""
    iterations = iter([1, 2])
    terms = [LossTerm("a", losses, "token-mean", float)]
    aggregator = make(terms)
    stream = aggregator.wrap(
        iter(fixture_f(1) * 2), num_microbatches=1, iteration=lambda: next(iterations)
    )
    for expected in (1, 2):
        microbatch = next(stream)
        loss, _ = aggregator.loss_func(microbatch, microbatch["losses"])
        assert loss.item() == pytest.approx(20 / 7 * expected, rel=1e-14)


@pytest.mark.parametrize("coefficient", [0, 0.0])
def test_coefficient_zero(coefficient):
    """Reported, without a gradient; a NaN there reaches nothing. All zero: still a loss."""
    nan = LossTerm("nan", lambda out, mb: out * math.nan, "token-mean", coefficient)
    step = make([nan, LossTerm("a", losses, "token-sum")]).begin_step(fixture_f(1))
    report = step.report(run_step(step))
    assert math.isnan(report["nan"]) and report["loss"] == report["a"] == 20.0
    step = make([LossTerm("a", losses, "token-sum", coefficient)]).begin_step(fixture_f(1))
    assert step.report(run_step(step)) == {"loss": 0.0, "a": 20.0}


def test_metrics_must_be_the_declared_ones():
    """A name that was not declared, or was and is missing."""
    for returned in ({}, {"b": 0}, {"a": 0, "b": 0}):
        terms = [
            LossTerm("t", lambda out, mb, r=returned: (out, r), "token-mean", metrics={"a": "sum"})
        ]
        step = make(terms).begin_step(fixture_f(1))
        with pytest.raises(ValueError, match=r"returned the metrics .* declared are \['a'\]"):
            run_step(step)


def test_metrics_of_a_single_loss():
    """loss_fn returns (losses, metrics); masked values count nowhere, not even in an extreme."""

    def loss_fn(output, microbatch):
        return output, {"mean": output, "top": output, "bottom": -output}

    aggregator = LossAggregator(
        loss_fn,
        loss_agg_mode="token-sum",
        metrics={"mean": "tokens", "top": "max", "bottom": "min"},
        model_config=model_config(),
        groups=ParallelGroups.single_process(),
        weight_dtype=torch.float64,
    )
    step = aggregator.begin_step(fixture_f(2))
    report = step.report(run_step(step))
    assert report == {"loss": 20.0, "mean": pytest.approx(20 / 7), "top": 6.0, "bottom": -6.0}


def test_metrics_per_unit():
    """Sums over units, divided by the units that have a token: 3 and 7 tokens make 5 a unit."""

    def loss_fn(output, microbatch):
        return output, {"tokens_per_unit": torch.ones_like(output)}

    terms = [LossTerm("t", loss_fn, "token-mean", metrics={"tokens_per_unit": "units"})]
    mask = [[1] * 5, [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0] * 5]
    microbatch = make_microbatch([[1.0] * 5] * 4, mask, unit_ids=torch.tensor([0, 1, 0, 2]))
    with pytest.raises(ValueError, match="num_units must be an int"):
        make(terms).begin_step([microbatch])
    step = make(terms).begin_step([microbatch], num_units=3)
    assert step.report(run_step(step))["tokens_per_unit"] == pytest.approx(5.0)


def test_extremes_of_an_empty_batch_are_nan():
    """No token, no extreme value; sums are 0."""
    terms = [LossTerm("t", lambda o, m: (o, {"top": o}), "token-mean", metrics={"top": "max"})]
    step = make(terms).begin_step([make_microbatch([[1.0]], [[0]])])
    report = step.report(run_step(step))
    assert math.isnan(report.pop("top")) and report == {"loss": 0.0, "t": 0.0}


def test_extremes_need_the_schedules_own_store():
    """A host that copied the reports into plain dicts lost them: said, not guessed."""
    terms = [LossTerm("t", lambda o, m: (o, {"top": o}), "token-mean", metrics={"top": "max"})]
    step = make(terms).begin_step(fixture_f(1))
    store = run_step(step)
    of_other_terms = run_step(make([LossTerm("t", losses, "token-mean")]).begin_step(fixture_f(1)))
    for other in ([dict(entry) for entry in store], of_other_terms):
        with pytest.raises(LossAggError, match="expects 1 minima and maxima in what this step"):
            step.report(other)


def test_copied_reports_without_extremes_are_fine():
    """Pairs survive a copy, as Megatron-LM's own reduction needs."""
    step = make([LossTerm("t", losses, "token-mean")]).begin_step(fixture_f(1))
    store = [dict(entry) for entry in run_step(step)]
    assert step.report(store)["t"] == pytest.approx(20 / 7)


def test_main_mask_without_tokens_under_the_per_token_flag():
    """R3 divides by nothing if T is 0: the other mask's term keeps its value and gradient."""
    terms = [
        LossTerm("policy", losses, "token-mean"),
        LossTerm("value", losses, "token-mean", mask_key="value_mask"),
    ]
    microbatch = make_microbatch([[3.0, 5.0]], [[0, 0]], value_mask=torch.tensor([[1, 1]]))
    step = make(terms, model_config=model_config(True)).begin_step([microbatch])
    report = step.report(run_step(step))
    assert report == {"loss": 4.0, "policy": 0.0, "value": 4.0}
    assert microbatch["losses"].grad.tolist() == [[0.5, 0.5]]


TERMS = [
    {"name": "policy", "loss_agg_mode": "token-mean", "metrics": {"ratio": "tokens"}},
    {
        "name": "kl",
        "loss_agg_mode": "seq-mean-token-mean",
        "coefficient": {"start": 0.0, "end": 0.1, "iterations": 10},
    },
]


def test_terms_from_yaml(tmp_path):
    """Written and read back equal; functions are given by name."""
    config = LossAggConfig(terms=TERMS)
    config.to_yaml(tmp_path / "terms.yaml")
    assert LossAggConfig.from_yaml(tmp_path / "terms.yaml") == config
    aggregator = LossAggregator.from_config(
        {"policy": lambda o, m: (o, {"ratio": o}), "kl": losses},
        config,
        model_config(),
        groups=ParallelGroups.single_process(),
    )
    step = aggregator.begin_step(fixture_f(1), iteration=5)
    report = step.report(run_step(step))
    assert report["loss"] == pytest.approx(20 / 7 + 0.05 * 3.5, rel=1e-6)
    assert set(report) == {"loss", "policy", "kl", "ratio"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs 'loss_agg_mode', .* or 'terms'"),
        ({"loss_agg_mode": "token-mean", "terms": TERMS}, "loss_agg_mode or terms, not both"),
        ({"terms": [{"name": "a"}]}, r"terms.a: missing option\(s\) loss_agg_mode"),
        (
            {"terms": [{**TERMS[0], "weight": 3}]},
            r"terms.policy: unknown option\(s\) weight; known ones: .*, name, loss_agg_mode, ",
        ),
        ({"terms": ["policy"]}, r"terms\[0\]: expected a mapping of options, got str"),
        ({"terms": [{**TERMS[1], "coefficient": {"start": 1}}]}, "kl.coefficient: missing .* end"),
        ({"terms": [{**TERMS[1], "coefficient": "high"}]}, "coefficient must be a number, got 'hi"),
        (
            {"terms": [{**TERMS[1], "coefficient": {"start": 1, "end": 0, "iterations": 1.5}}]},
            "terms.kl.coefficient.iterations must be a whole number, got 1.5",
        ),
        (
            {"terms": [{**TERMS[1], "coefficient": {"start": 1, "end": 0, "iterations": 0}}]},
            "iterations must be an int of at least 1",
        ),
    ],
)
def test_wrong_terms_in_a_file(values, message):
    """What is unknown, missing or impossible."""
    with pytest.raises(ValueError, match=message):
        LossAggConfig.from_dict(values)


def test_functions_that_do_not_fit_the_terms():
    """One function per term, by name."""
    config = LossAggConfig(terms=TERMS)
    for functions in (losses, {"policy": losses}, {"policy": losses, "kl": losses, "x": losses}):
        with pytest.raises(ValueError, match="The terms are policy, kl, but loss_fns has"):
            LossAggregator.from_config(functions, config, model_config())


def test_linear_coefficient():
    """From start to end, constant before and after."""
    coefficient = LinearCoefficient(1.0, 0.0, 4)
    assert [coefficient(i) for i in (-1, 0, 1, 4, 9)] == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert TermConfig(**TERMS[0]).coefficient == 1.0
    assert TermConfig(**TERMS[1]).coefficient == LinearCoefficient(0.0, 0.1, 10)
    for wrong in ((1.0, math.inf, 4), (True, 0.0, 4), (1.0, 0.0, 4.0), (1.0, 0.0, True)):
        with pytest.raises(ValueError, match="must be a finite number|must be an int of at least"):
            LinearCoefficient(*wrong)


def test_numbers_that_yaml_reads_as_text(tmp_path):
    """YAML takes 1e-1, which has no point, for a text."""
    path = tmp_path / "terms.yaml"
    path.write_text(
        "terms:\n"
        "- {name: a, loss_agg_mode: token-mean, coefficient: 1e-1}\n"
        "- {name: b, loss_agg_mode: token-mean, coefficient: "
        "{start: 1e-1, end: 0, iterations: 1e2}}\n"
    )
    a, b = LossAggConfig.from_yaml(path).loss_terms({"a": losses, "b": losses})
    assert a.coefficient == b.coefficient_at(0) == 0.1


def test_an_extreme_value_of_no_token():
    """A microbatch without positions has a maximum, too: that of nothing."""
    microbatch = microbatch_of(3, 0)
    values, _ = values_and_gradient(aggregator(), microbatch)
    assert values["loss"] == 0 and math.isnan(values["largest"])
