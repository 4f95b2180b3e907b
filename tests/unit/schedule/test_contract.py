"""ScheduleContract: regime, factors and refusals from a config and group sizes alone."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from one_process import FakeGroup, model_config

from megatron_lossagg import LossAggError, ParallelGroups, ScheduleContract
from megatron_lossagg.schedule.refusals import uses_full_iteration_cuda_graph

ALONE = ParallelGroups.single_process()


def groups_of(dp=1, cp=1, pp=1, num_virtual_stages=1):
    return ParallelGroups(
        dp=FakeGroup(dp),
        cp=FakeGroup(cp),
        dp_cp=FakeGroup(dp * cp),
        pp=FakeGroup(pp),
        num_virtual_stages=num_virtual_stages,
    )


@pytest.mark.parametrize(
    ("per_token", "returns", "regime"),
    [(False, "auto", "R1"), (False, "loss", "R1"), (True, "auto", "R3")]
    + [(True, "loss_and_num_tokens", "R3")],
)
def test_regime_follows_the_flag(per_token, returns, regime):
    """Public report 24: the compensation reads calculate_per_token_loss."""
    contract = ScheduleContract.detect(model_config(per_token), groups_of(3, 2), returns=returns)
    assert contract == ScheduleContract(regime, dp_size=3, cp_size=2, cp_gradient="local")
    assert contract.returns_num_tokens == per_token


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("cp_gradient", ["local", "replicated-value", "gathered"])
def test_factors(dp, cp, cp_gradient, num_microbatches):
    """R1 returns S*M*D and sees C/M, R3 returns S*T and sees 1; a gather costs 1/C in both."""
    gather = 1 / cp if cp_gradient == "gathered" else 1
    r1 = ScheduleContract("R1", dp, cp, cp_gradient)
    assert r1.loss_factor(num_microbatches) == pytest.approx(num_microbatches * dp * gather)
    assert r1.schedule_factor(num_microbatches) == cp / num_microbatches
    r3 = ScheduleContract("R3", dp, cp, cp_gradient)
    assert r3.loss_factor(num_microbatches) == gather
    assert r3.schedule_factor(num_microbatches) == 1
    assert r1.cp_copies == r3.cp_copies == (1 if cp_gradient == "local" else cp)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (3, 2)])
def test_factors_of_the_regimes_that_a_host_may_force(dp, cp, num_microbatches):
    """R2 returns S*M*D*C (0.12: S*M*D) and 1, R4 returns S*M/C: public reports 6 and 14."""
    m = num_microbatches
    r2 = ScheduleContract("R2", dp, cp, schedule_multiplies_by_cp=False)
    assert (r2.loss_factor(m), r2.schedule_factor(m)) == (m * dp * cp, 1 / m)
    old_r2 = ScheduleContract("R2", dp, cp, schedule_multiplies_by_cp=True)
    assert (old_r2.loss_factor(m), old_r2.schedule_factor(m)) == (m * dp, cp / m)
    r4 = ScheduleContract("R4", dp, cp)
    assert (r4.loss_factor(m), r4.schedule_factor(m)) == (m / cp, cp / m)
    for contract in (r2, old_r2, r4):
        # What is returned, times what is done to it, is S: DDP sums over ranks, R1 and R2 average.
        arrives = contract.loss_factor(m) * contract.schedule_factor(m) * contract.ddp_factor
        assert arrives == pytest.approx(1.0, rel=1e-15)
        assert not contract.weights_carry_num_tokens


@pytest.mark.parametrize(
    ("per_token", "returns", "regime"),
    [(True, "loss", "R4"), (False, "loss_and_num_tokens", "R2"), (False, "loss", "R1")],
)
def test_regime_follows_what_is_asked_for(per_token, returns, regime):
    """Two or three values, with the flag on or off."""
    contract = ScheduleContract.detect(model_config(per_token), ALONE, returns=returns)
    assert contract.regime == regime


@pytest.mark.parametrize(
    ("size", "hook"),
    [("num_moe_experts", "moe_grad_scale_func"), ("mtp_num_layers", "mtp_grad_scale_func")],
)
def test_R4_is_refused_for_losses_that_nothing_would_divide(size, hook):
    """MoE auxiliary and MTP losses, unless the config's hook covers them."""
    with pytest.raises(LossAggError, match=f"{size} set: .* undivided.*or set {hook}"):
        ScheduleContract.detect(model_config(True, **{size: 2}), ALONE, returns="loss")
    covered = model_config(True, **{size: 2, hook: lambda: 1.0})
    assert ScheduleContract.detect(covered, ALONE, returns="loss").regime == "R4"


def test_configurations_that_are_not_supported_are_refused():
    """Hybrid context parallelism outside of R3 with local losses."""
    hybrid = {"hybrid_context_parallel": True}
    for per_token, options in (
        (False, {}),
        (False, {"returns": "loss_and_num_tokens"}),
        (True, {"returns": "loss"}),
        (True, {"cp_gradient": "gathered"}),
    ):
        with pytest.raises(LossAggError, match="hybrid_context_parallel=True in regime R"):
            ScheduleContract.detect(model_config(per_token, **hybrid), ALONE, **options)
    assert ScheduleContract.detect(model_config(True, **hybrid), ALONE).regime == "R3"
    for config in (
        model_config(True, mtp_num_layers=1),
        model_config(False, mtp_num_layers=None, hybrid_context_parallel=False),
    ):
        ScheduleContract.detect(config, ALONE)


@pytest.mark.parametrize("returns", ["loss", "loss_and_num_tokens"])
@pytest.mark.parametrize("is_finite", [False, True])
def test_multi_token_prediction_with_the_flag_off(returns, is_finite):
    """R1 and R2 are refused where the installed Megatron-Core gives NaN without tokens."""
    probe = "megatron_lossagg.schedule.refusals.mtp_loss_is_finite_without_tokens"
    with mock.patch(probe, return_value=is_finite):
        config = model_config(False, mtp_num_layers=1)
        if is_finite:
            ScheduleContract.detect(config, ALONE, returns=returns)
            return
        message = "mtp_num_layers with .* NaN .*Set calculate_per_token_loss=True"
        with pytest.raises(LossAggError, match=message):
            ScheduleContract.detect(config, ALONE, returns=returns)


def test_interleaved_p2p_that_swaps_messages_is_refused():
    """PP=2 and VPP>1 only, with all but one setting: the message names it."""
    batched = model_config()
    overlapped = model_config(overlap_p2p_comm=True, batch_p2p_comm=False)
    for wrong in (
        batched,
        model_config(overlap_p2p_comm=True),
        model_config(overlap_p2p_comm=True, batch_p2p_comm=True),
        model_config(overlap_p2p_comm=False, batch_p2p_comm=False),
    ):
        with pytest.raises(
            LossAggError, match="overlap_p2p_comm=True and batch_p2p_comm=False in the model's c"
        ):
            ScheduleContract.detect(wrong, groups_of(pp=2, num_virtual_stages=2))
    for config, groups in (
        (overlapped, groups_of(pp=2, num_virtual_stages=2)),
        (batched, groups_of(pp=2)),
        (batched, groups_of(pp=4, num_virtual_stages=2)),
    ):
        ScheduleContract.detect(config, groups)


@pytest.mark.parametrize("wrong", [None, {}, SimpleNamespace(hidden_size=4), "config"])
def test_config_without_the_flag_is_refused(wrong):
    """Another object than the model's config must not read as flag off."""
    with pytest.raises(TypeError, match="must be the model's TransformerConfig, got") as caught:
        ScheduleContract.detect(wrong, ALONE)
    assert type(wrong).__name__ in str(caught.value)


def test_unknown_options_name_the_known_ones():
    """`returns` and `cp_gradient`."""
    with pytest.raises(ValueError, match="returns='both' .* auto, loss, loss_and_num_tokens"):
        ScheduleContract.detect(model_config(), ALONE, returns="both")
    with pytest.raises(ValueError, match="cp_gradient='x' .* local, replicated-value, gathered"):
        ScheduleContract.detect(model_config(), ALONE, cp_gradient="x")


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (None, False),
        ("full", False),
        ("full_iteration", True),
        (["attn"], False),
        ([SimpleNamespace(name="full_iteration")], True),
    ],
)
def test_full_iteration_cuda_graph_is_recognised(scope, expected):
    """A string, a list of strings or a list of enum members, as the releases have it."""
    assert uses_full_iteration_cuda_graph(model_config(cuda_graph_scope=scope)) == expected


@pytest.mark.parametrize(
    ("impl", "expected"),
    [(None, False), ("none", False), ("local", False), ("full_iteration", True)],
)
def test_full_iteration_cuda_graph_as_an_implementation(impl, expected):
    """Other releases say it in `cuda_graph_impl`."""
    assert uses_full_iteration_cuda_graph(model_config(cuda_graph_impl=impl)) == expected


def test_full_iteration_cuda_graph_without_the_option():
    """Releases without `cuda_graph_scope` have no such graphs."""
    assert not uses_full_iteration_cuda_graph(model_config())


def test_inconsistent_groups_are_refused():
    """dp must be the group without context parallelism: 2 x 2 ranks are not 2."""
    with pytest.raises(LossAggError, match="dp has 2 ranks and cp 2, but dp_cp has 2; expected 4"):
        ParallelGroups(dp=FakeGroup(2), cp=FakeGroup(2), dp_cp=FakeGroup(2))


def test_groups_answer_for_missing_ones():
    """None is a group of this process alone."""
    assert (ALONE.dp_size, ALONE.cp_size, ALONE.pp_size, ALONE.tp_size) == (1, 1, 1, 1)
    assert ALONE.is_last_stage and ALONE.cp_rank == ALONE.tp_rank == 0
    middle = ParallelGroups(pp=FakeGroup(3, 1), tp=FakeGroup(2, 1))
    assert not middle.is_last_stage and middle.tp_rank == 1
    assert ParallelGroups(pp=FakeGroup(3, 2)).is_last_stage
