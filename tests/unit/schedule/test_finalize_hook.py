"""The checks of wrapped steps run in finalize_model_grads_func: once, and nowhere else."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from one_process import (
    make_aggregator,
    model_config,
    ones,
    run_schedule,
)

from megatron_lossagg import LossAggError
from megatron_lossagg.step.step import Step


def finalize(*args, **kwargs):
    """Stands for Megatron's finalize_model_grads, at module level so that it can be pickled."""
    finalize.calls.append(args)
    return "result"


finalize.calls = []


def test_checks_run_in_finalize_once_per_step():
    """The hook keeps the original's arguments and result, and is installed once."""
    finalize.calls.clear()
    config = model_config(finalize_model_grads_func=finalize)
    aggregator = make_aggregator(model_config=config)
    wrapped = aggregator.wrap(iter(ones(4)), num_microbatches=2)
    assert config.finalize_model_grads_func is finalize
    run_schedule(aggregator.loss_func, wrapped, 2)
    hook = config.finalize_model_grads_func
    assert hook("model", None) == "result" and finalize.calls == [("model", None)]
    run_schedule(aggregator.loss_func, wrapped, 1)
    assert config.finalize_model_grads_func is hook
    with pytest.raises(LossAggError, match="took 1 microbatches .* planned for 2"):
        hook("model", None)


@pytest.mark.parametrize("as_keyword", [True, False])
def test_several_steps_in_one_run_of_the_per_token_path(as_keyword):
    """R3 rescales no loss: the tokens that the schedule summed up show that it ran two steps."""
    finalize.calls.clear()
    config = model_config(True, finalize_model_grads_func=finalize)
    aggregator = make_aggregator(model_config=config)
    wrapped = aggregator.wrap(iter(ones(6)), num_microbatches=2)

    def run_and_finalize(num_microbatches):
        run_schedule(aggregator.loss_func, wrapped, num_microbatches)
        num_tokens = torch.tensor(2 * num_microbatches, dtype=torch.int32)
        hook = config.finalize_model_grads_func
        return hook([], num_tokens=num_tokens) if as_keyword else hook([], num_tokens)

    run_and_finalize(2)
    with pytest.raises(LossAggError, match="summed up 8 tokens .* loss_func returned 4"):
        run_and_finalize(4)


def test_check_is_installed_once():
    """However many steps there were, finalize runs each check once: it costs a collective."""
    config = model_config(finalize_model_grads_func=finalize)
    aggregator = make_aggregator(model_config=config)
    wrapped = aggregator.wrap(iter(ones(6)), num_microbatches=2)
    for _ in range(3):
        run_schedule(aggregator.loss_func, wrapped, 2)
    with mock.patch.object(Step, "validate") as validate:
        config.finalize_model_grads_func([], None)
    validate.assert_called_once_with(None)


def test_two_aggregators_on_one_config():
    """Policy and value losses: both are checked, the original runs once."""
    finalize.calls.clear()
    config = model_config(finalize_model_grads_func=finalize)
    good, bad = (make_aggregator(model_config=config) for _ in range(2))
    run_schedule(good.loss_func, good.wrap(iter(ones(2)), num_microbatches=2), 2)
    run_schedule(bad.loss_func, bad.wrap(iter(ones(2)), num_microbatches=2), 1)
    with pytest.raises(LossAggError, match="took 1 microbatches"):
        config.finalize_model_grads_func([])
    assert len(finalize.calls) == 1


def test_trainer_that_sets_finalize_again():
    """A trainer that replaces the function between steps gets the checks again."""
    config = model_config(finalize_model_grads_func=finalize)
    aggregator = make_aggregator(model_config=config)
    wrapped = aggregator.wrap(iter(ones(4)), num_microbatches=2)
    run_schedule(aggregator.loss_func, wrapped, 2)
    config.finalize_model_grads_func = finalize
    run_schedule(aggregator.loss_func, wrapped, 1)
    with pytest.raises(LossAggError, match="took 1 microbatches"):
        config.finalize_model_grads_func([])


def test_config_without_finalize_stays_without():
    """None means that the schedule finalizes nothing: it is left alone."""
    config = model_config(finalize_model_grads_func=None)
    aggregator = make_aggregator(model_config=config)
    run_schedule(aggregator.loss_func, aggregator.wrap(iter(ones(1)), num_microbatches=1), 1)
    assert config.finalize_model_grads_func is None


def test_full_iteration_cuda_graphs_get_no_hook():
    """Finalize would be captured with the step, and the checks read values."""
    config = model_config(finalize_model_grads_func=finalize, cuda_graph_scope="full_iteration")
    aggregator = make_aggregator(model_config=config)
    run_schedule(aggregator.loss_func, aggregator.wrap(iter(ones(1)), num_microbatches=1), 1)
    assert config.finalize_model_grads_func is finalize


def test_hooked_config_can_be_copied_and_pickled():
    """Deep copies keep the checks; a pickled config holds the function that was wrapped."""
    config = SimpleNamespace(calculate_per_token_loss=False, finalize_model_grads_func=finalize)
    aggregator = make_aggregator(model_config=config)
    wrapped = aggregator.wrap(iter(ones(1)), num_microbatches=1)
    run_schedule(aggregator.loss_func, wrapped, 1)
    hook = config.finalize_model_grads_func
    assert hook is not finalize
    assert copy.deepcopy(config).finalize_model_grads_func is hook
    assert copy.copy(config).finalize_model_grads_func is hook
    assert pickle.loads(pickle.dumps(config)).finalize_model_grads_func is finalize
