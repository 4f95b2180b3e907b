"""What a loss_fn returned: messages speak of the metric, and of a term only if there are terms."""

from __future__ import annotations

import pytest
import torch
from one_process import fixture_f, make_aggregator, run_step

from megatron_lossagg import LossTerm
from megatron_lossagg.objective.loss_fn_result import check_token_losses


def run_with(value, normaliser="tokens", *, terms=False):
    def loss_fn(output, microbatch):
        return output, {"ratio": value(output)}

    metrics = {"ratio": normaliser}
    if terms:
        term = LossTerm("policy", loss_fn, "token-mean", metrics=metrics)
        aggregator = make_aggregator(None, loss_fn=None, terms=[term])
    else:
        aggregator = make_aggregator(loss_fn=loss_fn, metrics=metrics)
    return run_step(aggregator.begin_step(fixture_f(1)))


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda x: 1.0, TypeError, r"a float as metric 'ratio': return a tensor of one value per"),
        (lambda x: x.sum(), ValueError, r"metric 'ratio' has shape \(\), but .* \(4, 4\): return"),
        (lambda x: x[:, :2], ValueError, r"metric 'ratio' has shape \(4, 2\)"),
        (lambda x: x[:3, 0], ValueError, r"metric 'ratio' has shape \(3,\).* per sequence, \[4\]"),
        (lambda x: x[:, 0], ValueError, "'ratio' has one value per sequence, .* mean over tokens"),
        (lambda x: x + 1j, TypeError, r"metric 'ratio' holds torch.complex128"),
    ],
)
def test_a_metric_of_the_wrong_kind(value, error, message, terms):
    """Its name, what it is and what it should be."""
    with pytest.raises(error, match=message) as caught:
        run_with(value, terms=terms)
    assert "per-token losses" not in str(caught.value) and "the loss'" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda output, _: output.mean(), ValueError, r"^loss_fn returned losses of shape \(\)"),
        (lambda output, _: 1.0, TypeError, "^loss_fn must return a tensor of per-token losses"),
        (lambda output, _: output.long(), TypeError, "^loss_fn must return floating-point losses"),
        (lambda output, _: (output, {"x": output}), ValueError, "^loss_fn returned the metrics"),
        (lambda output, _: (output, 3), ValueError, "^loss_fn returned the metrics int"),
    ],
)
def test_without_terms_none_is_named(loss_fn, error, message):
    """There is one loss, which needs no name; with terms the message has that of its term."""
    with pytest.raises(error, match=message):
        run_step(make_aggregator(loss_fn=loss_fn).begin_step(fixture_f(1)))
    term = LossTerm("policy", loss_fn, "token-mean")
    aggregator = make_aggregator(None, loss_fn=None, terms=[term])
    with pytest.raises(error, match="^loss_fn of term 'policy' "):
        run_step(aggregator.begin_step(fixture_f(1)))


def test_bools_and_integers_are_numbers():
    """Means of conditions and of counts."""
    for value in (lambda x: x > 2, lambda x: (x > 2).long(), lambda x: (x > 2).to(torch.uint8)):
        [report] = run_with(value)
        numerator, denominator = report["ratio"].tolist()
        assert numerator / denominator == 3 / 7


@pytest.mark.parametrize(
    ("losses", "hint"),
    [
        (torch.tensor(1.0), r"shape \(\), .* shape \(2, 3\)\. It looks reduced already"),
        (torch.ones(2), r"shape \(2,\), .* It looks reduced already: return the loss of every"),
        (torch.ones(2, 4), r"shape \(2, 4\), .* shape \(2, 3\)\. .* slice_for_cp; otherwise"),
        (torch.ones(3, 2), r"check the mask's width"),
        (torch.ones(1, 3), r"shape \(1, 3\)"),
    ],
)
def test_losses_of_another_shape(losses, hint):
    """A reduced loss and a mask of another width get different advice; nothing broadcasts."""
    with pytest.raises(ValueError, match=hint):
        check_token_losses(losses, torch.ones(2, 3))


def test_reduced_loss_of_a_one_token_mask():
    """A scalar is not per token even if there is one token only."""
    with pytest.raises(ValueError, match="It looks reduced already"):
        check_token_losses(torch.tensor(1.0), torch.ones(1, 1))


@pytest.mark.parametrize("losses", [None, 1.0, (torch.ones(1, 1),), {"loss": 1}])
def test_losses_that_are_no_tensor(losses):
    """The type that came back from loss_fn is named."""
    with pytest.raises(TypeError, match="tensor of per-token losses, got") as caught:
        check_token_losses(losses, torch.ones(1, 1))
    assert type(losses).__name__ in str(caught.value)


def test_integer_losses():
    """Token ids or counts instead of losses."""
    with pytest.raises(TypeError, match=r"floating-point losses, got torch\.int64"):
        check_token_losses(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1))
