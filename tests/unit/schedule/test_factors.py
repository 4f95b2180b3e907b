"""The arithmetic of R1 to R4, its words, and the list of factors that `doctor` prints."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import product

import pytest
from one_process import FakeGroup, model_config

from megatron_lossagg import ParallelGroups, ScheduleContract
from megatron_lossagg.schedule import CP_GRADIENTS, RETURNS, Regime, ScheduleFactors, regime_of
from megatron_lossagg.schedule.named_factors import factors_carried, factors_met

# (calculate_per_token_loss, values returned) of each, as in the table of the module.
QUESTIONS = {
    "R1": (False, 2),
    "R2": (False, 3),
    "R3": (True, 3),
    "R4": (True, 2),
}
ALL = list(product(QUESTIONS, [(1, 1, 1), (5, 3, 2), (4, 2, 6)], CP_GRADIENTS, [False, True]))


def factors_of(regime, sizes, cp_gradient, multiplies_by_cp, host_factor=1):
    num_microbatches, dp, cp = sizes
    return num_microbatches, ScheduleFactors(
        regime, dp, cp, cp_gradient, multiplies_by_cp, host_factor
    )


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_regime_answers_for_itself_and_is_its_name(name):
    """Compares, prints, hashes and serializes as the string that configs and reports hold."""
    per_token, num_values = QUESTIONS[name]
    regime = regime_of("loss" if num_values == 2 else "loss_and_num_tokens", per_token)
    assert regime is Regime(name) and regime == name
    assert f"{regime}" == str(regime) == name and {name: 1}[regime] == 1
    assert json.dumps(regime) == f'"{name}"'
    assert regime.uses_per_token_flag == per_token
    assert regime.returns_num_tokens == (num_values == 3)
    assert regime.divides_by_num_tokens == (name == "R3")


@pytest.mark.parametrize(("regime", "sizes", "cp_gradient", "multiplies_by_cp"), ALL)
def test_the_named_factors_are_those_of_the_loss(regime, sizes, cp_gradient, multiplies_by_cp):
    """Their products are `loss_factor` and what the schedule and DDP do; T cancels in R3."""
    m, factors = factors_of(regime, sizes, cp_gradient, multiplies_by_cp, Fraction(2, 7))
    num_tokens = 30 if regime == "R3" else 1
    carried = math.prod(f.value for f in factors_carried(factors, m, 30))
    assert carried == pytest.approx(factors.loss_factor(m) * num_tokens, rel=1e-15)
    met = math.prod(f.value for f in factors_met(factors, m, 30))
    scaled = factors.schedule_factor(m) * factors.ddp_factor * 2 / 7
    assert met == pytest.approx(scaled / num_tokens, rel=1e-15)
    assert met * carried == pytest.approx(factors.undo_cp_gather, rel=1e-15)


@pytest.mark.parametrize(("regime", "sizes", "cp_gradient", "multiplies_by_cp"), ALL)
def test_a_hosts_factor_is_undone(regime, sizes, cp_gradient, multiplies_by_cp):
    """It divides `loss_factor`, leaves Megatron's factors, and 1 changes no bit."""
    m, without = factors_of(regime, sizes, cp_gradient, multiplies_by_cp)
    for host_factor in (Fraction(1, 4), 8):
        _, with_host = factors_of(regime, sizes, cp_gradient, multiplies_by_cp, host_factor)
        assert with_host.loss_factor(m) == without.loss_factor(m) / host_factor
        assert with_host.schedule_factor(m) == without.schedule_factor(m)
        assert with_host.ddp_factor == without.ddp_factor
    _, with_one = factors_of(regime, sizes, cp_gradient, multiplies_by_cp, Fraction(1))
    assert with_one == without and with_one.loss_factor(m).hex() == without.loss_factor(m).hex()


def test_a_hosts_factor_reaches_the_contract():
    """`detect` takes it; a third is exact where 1/3 of a float would not be."""
    groups = ParallelGroups(dp=FakeGroup(2), dp_cp=FakeGroup(2))
    contract = ScheduleContract.detect(model_config(), groups, host_factor=Fraction(1, 3))
    assert contract.loss_factor(4) == 4 * 2 * 3


@pytest.mark.parametrize("wrong", [0.25, 0, -1, Fraction(-1, 2), None, "1/4"])
def test_a_hosts_factor_is_a_positive_fraction(wrong):
    """A float would not be undone exactly; the message shows what is meant."""
    with pytest.raises(ValueError, match=r"positive Fraction or int, got .*pass Fraction\(1, 4\)"):
        ScheduleFactors("R1", 1, 1, host_factor=wrong)


def test_unknown_words_are_told_with_the_known_ones():
    """A regime and a convention; the strings of the options are plain ones."""
    with pytest.raises(ValueError, match="regime='R5' does not exist; expected one of R1, R2, R3"):
        ScheduleFactors("R5", 1, 1)
    with pytest.raises(ValueError, match="cp_gradient='all' .* local, replicated-value, gathered"):
        ScheduleFactors("R1", 1, 1, "all")
    assert {type(word) for word in (*RETURNS, *CP_GRADIENTS)} == {str}
