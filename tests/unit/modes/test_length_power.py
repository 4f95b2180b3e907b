"""`length-power-A`: its ends are known modes, loops in between, and its kin in the literature."""

from __future__ import annotations

import pytest
import torch

from megatron_lossagg import (
    GlobalCounts,
    LossAggConfig,
    LossAggregator,
    ParallelGroups,
    agg_loss,
    register_mode,
    token_weights,
)
from megatron_lossagg.cli.verify.config import VerifyConfig
from megatron_lossagg.modes import ModeSpec, get_mode, undivided_counts
from megatron_lossagg.modes.length_power import exponent_of, mode_name

# n_s = 4, 1, 2, 0
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
COUNTS = GlobalCounts(num_tokens=7, num_valid_seqs=3, num_seqs=4)
LOSSES = torch.tensor([[1, 2, 3, 4], [6, 9, 9, 9], [2, 9, 4, 9], [8, 9, 9, 9]]).double()
SEQUENCE_COUNTS = pytest.mark.parametrize("sequence_count", ["valid", "nominal"])


def weights(mode, **options):
    return token_weights(MASK, mode, COUNTS, weight_dtype=torch.float64, **options)


@SEQUENCE_COUNTS
@pytest.mark.parametrize(
    ("exponent", "known"), [(0, "seq-mean-token-sum"), (1, "seq-mean-token-mean")]
)
def test_the_ends_are_known_modes(exponent, known, sequence_count):
    """A = 0 and A = 1, bit for bit."""
    ours = weights(mode_name(exponent), sequence_count=sequence_count)
    assert torch.equal(ours, weights(known, sequence_count=sequence_count))


@SEQUENCE_COUNTS
@pytest.mark.parametrize("exponent", [0.5, 0.75, 2])
def test_loops(exponent, sequence_count):
    """The definition, one token after the other."""
    num_seqs = 3 if sequence_count == "valid" else 4
    expected = 0.0
    for row in range(4):
        num_tokens = int(MASK[row].sum())
        for column in range(4):
            if MASK[row, column]:
                expected += LOSSES[row, column].item() / num_tokens**exponent / num_seqs
    ours = (weights(f"length-power-{exponent}", sequence_count=sequence_count) * LOSSES).sum()
    assert ours.item() == pytest.approx(expected, rel=1e-14)


def test_delta_l_normalization_is_the_norm_mode_of_scaled_losses():
    """What the docstring says of arXiv:2509.07558: its weights, and the factor to ours."""
    exponent, length, lengths = 0.75, 4, [4, 1, 2]
    total = sum(n**-exponent for n in lengths)
    expected = ours = 0.0
    for row, num_tokens in enumerate(lengths):
        for column in range(4):
            if MASK[row, column]:
                expected += LOSSES[row, column].item() * num_tokens**-exponent / (length * total)
    powers = torch.tensor([*(n**-exponent for n in lengths), 0.0], dtype=torch.float64)
    norm = weights("seq-mean-token-sum-norm", loss_scale_factor=4, norm_semantics="seq-mean")
    scaled = LOSSES * (powers / (total / 3))[:, None]
    assert (norm * scaled).sum().item() == pytest.approx(expected, rel=1e-14)
    ours = (weights("length-power-0.75") * LOSSES).sum().item()
    assert ours / expected == pytest.approx(length * total / 3, rel=1e-14)


def test_it_can_be_deferred():
    """Its weights are those of counts of 1, divided by B."""
    spec, device = ModeSpec("length-power-0.5"), torch.device("cpu")
    factor = get_mode("length-power-0.5").sequence_factor
    n_s = torch.tensor([4.0, 1.0], dtype=torch.float64)
    undivided = factor(n_s, spec.inputs(undivided_counts(), device))
    torch.testing.assert_close(
        undivided / spec.divisor(COUNTS), factor(n_s, spec.inputs(COUNTS, device))
    )


def test_every_rank_writes_it_alike():
    """Ranks compare modes by their names, so that each has one spelling."""
    assert mode_name(0.5) == "length-power-0.5" and exponent_of("length-power-0.5") == 0.5
    assert mode_name(1.0) == "length-power-1" and exponent_of("token-mean") is None
    for wrong in ("length-power-.5", "length-power-0.50", "length-power-5e-1", "length-power-+0.5"):
        with pytest.raises(ValueError, match="write it 'length-power-0.5'"):
            ModeSpec(wrong)
    with pytest.raises(ValueError, match="'a half' is no number; write for example"):
        ModeSpec("length-power-a half")
    for outside in ("-1", "5", "nan", "inf"):
        with pytest.raises(ValueError, match="must be a number from 0 to 4, got"):
            ModeSpec(f"length-power-{outside}")
    with pytest.raises(ValueError, match="'length-power-0.5' exists already"):
        register_mode("length-power-0.5", lambda n_s, c: n_s)


def test_in_a_config_and_a_step():
    """A name in a file suffices; the plan's weights are compared, as there is no checksum."""
    aggregator = LossAggregator.from_config(
        lambda output_tensor, microbatch: output_tensor,
        LossAggConfig(loss_agg_mode="length-power-0.5", weight_dtype="float64"),
        type("Config", (), {"calculate_per_token_loss": False})(),
        groups=ParallelGroups.single_process(),
    )
    step = aggregator.begin_step([{"loss_mask": MASK}])
    [microbatch] = step.microbatches
    _, report = step.loss_func(microbatch, LOSSES.clone().requires_grad_())
    step.validate()
    expected = (10 / 2 + 6 / 1 + 6 / 2**0.5) / 3
    assert step.report([report])["loss"] == pytest.approx(expected, rel=1e-14)


def test_the_drop_in_has_verls_modes_only():
    """agg_loss refuses what it would silently compute as another mode."""
    with pytest.raises(ValueError, match="agg_loss cannot compute 'length-power-0.5', only verl's"):
        agg_loss(LOSSES, MASK, "length-power-0.5")


def test_verify_takes_it():
    """`verify --modes length-power-0.5`, and a misspelling is told."""
    config = VerifyConfig.load(None, {"modes": "token-mean, length-power-0.5"})
    assert list(config.plans()) == ["token-mean", "length-power-0.5"]
    with pytest.raises(ValueError, match="write it 'length-power-0.5'"):
        VerifyConfig.load(None, {"modes": "length-power-.5"})
