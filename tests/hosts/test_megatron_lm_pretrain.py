"""Property: what Megatron-LM's own `pretrain()` logs is the objective, whichever regime runs.

Its `train_step`, `training_log` and `evaluate` sum up what our `loss_func` reports; they run here
as they are released. Expected values are sums over rows and tokens, in one process.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from megatron_lm_on_cpu import RELEASE, Pretraining, pretrain

from megatron_lossagg import LossAggregator, slice_for_cp
from megatron_lossagg.testing.batch.global_batch import GlobalBatch, ragged_batch
from megatron_lossagg.testing.layout.layout import Layout
from megatron_lossagg.testing.ranks.releases import release_pool
from megatron_lossagg_plugin.megatron_lm import make_forward_step

pytestmark = pytest.mark.conformance
_FOLDER = Path(__file__).parents[2] / ".releases"
_LAYOUTS = ["D=2 M=2", "PP=2 M=4", "C=2 M=4", "C=2 D=2 M=2"]
_NAME = "lm loss"
_EVALUATED = "lm loss validation"

in_every_layout = pytest.mark.parametrize("text", _LAYOUTS, ids=lambda t: t.replace(" ", ","))
in_both_regimes = pytest.mark.parametrize("per_token", [False, True], ids=["R1", "R3"])
with_and_without_sft = pytest.mark.parametrize("sft", [False, True], ids=["", "sft"])


@pytest.fixture(scope="module")
def pool():
    if not (_FOLDER / RELEASE).is_dir():
        pytest.skip(
            f"megatron-core {RELEASE} is not in .releases; tools/fetch_releases.py puts it there"
        )
    with release_pool(4, RELEASE, _FOLDER, timeout_s=240) as pool:
        yield pool


def _batch(seed, is_empty=False):
    """16 rows, of which the last four are a fully masked microbatch in every layout here."""
    batch = ragged_batch(16, dp=2, num_microbatches=2, extra_fields=("losses",), seed=seed)
    rows = dict(batch.rows)
    if is_empty:
        rows["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    # What is masked lies outside of the range of what is not.
    masked = torch.where(rows["losses"] > 0, 1e6, -1e6)
    rows["ratios"] = torch.where(rows["loss_mask"] > 0, 3 * rows["losses"], masked)
    return GlobalBatch(rows, batch.assignment)


def _num_tokens(batch):
    return batch.rows["loss_mask"].sum().item()


def _objective(batch, mode):
    mask = batch.rows["loss_mask"].double()
    sums, lengths = (batch.rows["losses"] * mask).sum(dim=1), mask.sum(dim=1)
    if mode == "token-mean":
        return (sums.sum() / lengths.sum().clamp(min=1)).item()
    assert mode == "seq-mean-token-mean"
    return ((sums / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)).item()


def _valid_ratios(batch):
    return batch.rows["ratios"][batch.rows["loss_mask"] > 0]


def _loss_fn(output, batch):
    return output * batch["losses"]


def _loss_fn_with_metrics(output, batch):
    return _loss_fn(output, batch), {"highest": batch["ratios"], "lowest": batch["ratios"]}


def _get_batch(data_iterator, vp_stage=None):
    return slice_for_cp(next(data_iterator))


def _call_model(model, batch):
    return model(batch["loss_mask"])


def _aggregator(config, mode, **options):
    return LossAggregator(
        options.pop("loss_fn", _loss_fn),
        loss_agg_mode=mode,
        model_config=config,
        weights_key="loss_mask",
        weight_dtype=torch.float64,
        **options,
    )


def _forward_step(aggregator, **options):
    return make_forward_step(aggregator, _get_batch, call_model=_call_model, **options)


def _pretrained(case, mode, aggregator_options, options):
    return pretrain(
        case,
        lambda config: _forward_step(_aggregator(config, mode, **aggregator_options), **options),
    )


def _logs(
    pool,
    text,
    per_token,
    *,
    training=(),
    evaluation=(),
    sft=False,
    mode="seq-mean-token-mean",
    aggregator_options=None,
    **options,
):
    """What the ranks that have losses write to TensorBoard."""
    layout = Layout.parse(text)
    training, evaluation = (
        tuple(batch.split(layout.dp, layout.num_microbatches) for batch in batches)
        for batches in (training or [_batch(0)], evaluation)
    )
    case = Pretraining(layout, per_token, training, evaluation, ("--sft",) if sft else ())
    logs = pool.run(
        _pretrained, case, mode, aggregator_options or {}, options, world_size=layout.world_size
    )
    reporting = [log for log in logs if _NAME in log]
    # The last rank is the one that Megatron-LM gives a writer.
    assert len(reporting) == layout.world_size // layout.pp and _NAME in logs[-1]
    return reporting


@in_both_regimes
@in_every_layout
def test_training_logs_the_objective_of_each_step(pool, text, per_token):
    training = [_batch(0), _batch(1)]
    for log in _logs(pool, text, per_token, training=training):
        expected = [_objective(batch, "seq-mean-token-mean") for batch in training]
        assert log[_NAME] == pytest.approx(expected, rel=1e-12)


@in_both_regimes
def test_a_batch_without_tokens_logs_zero(pool, per_token):
    """Not NaN, which a quotient of sums would be; the steps around it are what they are."""
    training = [_batch(0), _batch(1, is_empty=True), _batch(2)]
    for log in _logs(pool, "D=2 M=2", per_token, training=training):
        expected = [_objective(batch, "seq-mean-token-mean") for batch in training]
        assert expected[1] == 0
        assert log[_NAME] == pytest.approx(expected, rel=1e-12)


@with_and_without_sft
@in_both_regimes
@in_every_layout
def test_evaluation_logs_the_mean_over_its_batches(pool, text, per_token, sft):
    """With --sft, `evaluate` averages the quotients of microbatches: a masked one counts, too."""
    evaluation = [_batch(2), _batch(3)]
    assert _num_tokens(evaluation[0]) != _num_tokens(evaluation[1])
    for log in _logs(pool, text, per_token, evaluation=evaluation, sft=sft):
        expected = fmean(_objective(batch, "seq-mean-token-mean") for batch in evaluation)
        assert log[_EVALUATED] == pytest.approx([expected], rel=1e-5)


@in_both_regimes
def test_an_evaluation_batch_without_tokens_counts_as_zero(pool, per_token):
    evaluation = [_batch(2), _batch(3, is_empty=True)]
    for log in _logs(pool, "D=2 M=2", per_token, evaluation=evaluation):
        expected = _objective(evaluation[0], "seq-mean-token-mean") / 2
        assert log[_EVALUATED] == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
@in_both_regimes
@in_every_layout
def test_evaluation_by_tokens_weights_its_batches(pool, text, per_token, mode):
    """sum T_k J_k / sum T_k: in token-mean the mean over all tokens, as of the host's own loss."""
    evaluation = [_batch(2), _batch(3)]
    expected = sum(_num_tokens(batch) * _objective(batch, mode) for batch in evaluation)
    expected /= sum(map(_num_tokens, evaluation))
    for log in _logs(
        pool, text, per_token, evaluation=evaluation, mode=mode, evaluation_average="tokens"
    ):
        assert log[_EVALUATED] == pytest.approx([expected], rel=1e-5)


@in_both_regimes
@in_every_layout
def test_extremes_reach_the_training_log(pool, text, per_token):
    """Over the valid tokens of the global batch, exactly. An evaluation has no place for them."""
    training = [_batch(0), _batch(1)]
    metrics = {"highest": "max", "lowest": "min"}
    for log in _logs(
        pool,
        text,
        per_token,
        training=training,
        evaluation=[_batch(2)],
        aggregator_options={"loss_fn": _loss_fn_with_metrics, "metrics": metrics},
    ):
        assert log["highest"] == [_valid_ratios(batch).max().item() for batch in training]
        assert log["lowest"] == [_valid_ratios(batch).min().item() for batch in training]
        assert not {"highest validation", "lowest validation"} & set(log)
        expected = [_objective(batch, "seq-mean-token-mean") for batch in training]
        assert log[_NAME] == pytest.approx(expected, rel=1e-12)


def _measured_pretraining(case, in_a_step):
    """(log, measured factor) with contract="measure", measured with the chunks of `pretrain`."""
    chunks, measured = [], []
    aggregators = []

    def measure():
        if chunks and not measured:
            measured.append(aggregators[0].measure(model=list(chunks)).factor)

    def on_setup(model):
        chunks.extend(model)
        if not in_a_step:
            measure()

    def forward_step_of(config):
        aggregators.append(_aggregator(config, "token-mean", contract="measure"))
        forward_step = _forward_step(aggregators[0])

        def measure_first(*args, **kwargs):
            measure()
            return forward_step(*args, **kwargs)

        return measure_first

    log = pretrain(case, forward_step_of, on_setup)
    return log, measured


@pytest.mark.parametrize("in_a_step", [False, True], ids=["before-training", "in-a-step"])
@in_both_regimes
def test_measuring_inside_of_pretrain(pool, per_token, in_a_step):
    """Its DDP checks gradients by the rerun state machine, which asserts that a step runs."""
    layout, batch = Layout.parse("D=2 M=2"), _batch(0)
    case = Pretraining(
        layout,
        per_token,
        (batch.split(layout.dp, layout.num_microbatches),),
        arguments=("--check-for-large-grads",),
    )
    for log, factors in pool.run(_measured_pretraining, case, in_a_step, world_size=2):
        # Two calls per rank, in R3 of one token each.
        assert factors == [pytest.approx(1 / 4)]
        assert log[_NAME] == pytest.approx([_objective(batch, "token-mean")], rel=1e-12)
