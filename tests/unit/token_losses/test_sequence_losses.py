"""Losses with a ratio per sequence: rows and packed, against loops over sequences in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lossagg import token_losses
from megatron_lossagg.token_losses import sequence_ids_of
from megatron_lossagg.token_losses.sequence_stats import TokensOfSequences

F64 = torch.float64


def gspo(x, old, a, mask, **where):
    return token_losses.gspo(x, old, a, mask, clip_low=0.2, clip_high=0.3, **where)


def gmpo(x, old, a, mask, **where):
    return token_losses.gmpo(x, old, a, mask, clip_low=0.3, clip_high=0.4, **where)


def tis(x, old, a, mask, **where):
    weights = token_losses.truncated_importance_weights(x, old, mask, level="sequence", **where)
    return weights + 0 * x.masked_fill(~mask, 0)  # it is detached; a graph for `run`


def gspo_of_sequence(x, old, a):
    ratio = torch.exp(sum((x - old).detach()) / len(x))
    token_ratio = ratio * torch.exp(x) / torch.exp(x).detach()
    return torch.maximum(-a * token_ratio, -a * token_ratio.clamp(0.8, 1.3))


def gmpo_of_sequence(x, old, a):
    product = torch.ones((), dtype=F64)
    for t in range(len(x)):
        ratio = torch.exp(x[t] - old[t])
        if a[t] > 0:
            product = product * torch.minimum(ratio, torch.exp(torch.tensor(0.4, dtype=F64)))
        elif a[t] < 0:
            product = product * torch.maximum(ratio, torch.exp(torch.tensor(-0.3, dtype=F64)))
    return -a * product ** (1 / len(x))


def tis_of_sequence(x, old, a):
    return torch.exp(sum((x - old).detach())).clamp(max=2.0).expand(len(x)) + 0 * x


LOSSES = {
    "gspo": (gspo, gspo_of_sequence),
    "gmpo": (gmpo, gmpo_of_sequence),
    "tis": (tis, tis_of_sequence),
}
lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6)


def make_sequences(lengths, seed):
    """Per sequence (x, old, A, mask), 1-dimensional; the padding behind each has garbage."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length, padding in lengths:
        padding = padding if length else 0
        fields = list(torch.randn(3, length + padding, generator=generator, dtype=F64))
        fields[0] = fields[0] * 0.3 + fields[1]
        mask = torch.rand(length + padding, generator=generator) < 0.75
        mask[length:] = False
        sequences.append((*(f.masked_fill(~mask, math.nan) for f in fields), mask))
    return sequences


def expected_of(formula, sequences):
    """(values, gradients) of every sequence by itself, with weights that differ per token."""
    values, gradients = [], []
    for number, (x, old, a, mask) in enumerate(sequences):
        value, gradient = torch.zeros_like(x), torch.zeros_like(x)
        if mask.any():
            leaf = x[mask].clone().requires_grad_()
            loss = formula(leaf, old[mask], a[mask])
            (loss * weights_of(number, len(x))[mask]).sum().backward()
            value[mask], gradient[mask] = loss.detach(), leaf.grad
        values.append(value)
        gradients.append(gradient)
    return values, gradients


def weights_of(number, length):
    return torch.rand(length, generator=torch.Generator().manual_seed(number), dtype=F64)


def as_rows(sequences):
    """(x, old, A, mask, weights) [n, width] and the place of every token."""
    width = max(1, *(len(s[0]) for s in sequences))
    weighted = [(*s, weights_of(i, len(s[0]))) for i, s in enumerate(sequences)]
    return [
        torch.stack([torch.nn.functional.pad(s[field], (0, width - len(s[0]))) for s in weighted])
        for field in range(5)
    ]


def as_packed(sequences, tail):
    """The same fields [1, t], with padding at the end."""
    weighted = [(*s, weights_of(i, len(s[0]))) for i, s in enumerate(sequences)]
    return [
        torch.nn.functional.pad(torch.cat([s[field] for s in weighted]), (0, tail))[None]
        for field in range(5)
    ]


def run(loss, x, old, a, mask, weights, **where):
    x = x.clone().requires_grad_()
    values = loss(x, old, a, mask, **where)
    (values * weights).sum().backward()
    return values.detach(), x.grad


@pytest.mark.parametrize("name", LOSSES)
@given(lengths, st.integers(0, 20), st.booleans(), st.integers(0, 2))
def test_rows_and_packed_are_the_formula_of_each_sequence(name, lengths, seed, padded, tail):
    """Any lengths, holes, padding with NaN, weights and advantages per token: 1e-12."""
    loss, formula = LOSSES[name]
    if not padded:
        lengths = [(length, 0) for length, _ in lengths]
    sequences = make_sequences(lengths, seed)
    values, gradients = expected_of(formula, sequences)

    rows = as_rows(sequences)
    for found, expected in zip(run(loss, *rows), (values, gradients), strict=True):
        for row, expected_row in zip(found, expected, strict=True):
            torch.testing.assert_close(row[: len(expected_row)], expected_row, rtol=1e-12, atol=0)
            assert (row[len(expected_row) :] == 0).all()

    ends = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).int()
    starts = torch.tensor([0, *(len(s[0]) for s in sequences)]).cumsum(0).int()
    packed = as_packed(sequences, tail)
    ids = sequence_ids_of(
        ends[None] if seed % 2 else ends,
        packed[0].shape[1],
        cu_seqlens_padded=starts if padded else None,
    )
    where = {"sequence_ids": ids, "num_sequences": len(lengths) + seed % 3}
    for found, expected in zip(run(loss, *packed, **where), (values, gradients), strict=True):
        expected = torch.nn.functional.pad(torch.cat(expected), (0, tail))
        torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=0)


def test_sequence_ids_of_padded_and_repeated_boundaries():
    """Padding has -1; loaders repeat the last boundary to a fixed number."""
    cu_seqlens = torch.tensor([0, 3, 4, 4, 6, 6, 6], dtype=torch.int32)
    padded = torch.tensor([0, 4, 6, 6, 8, 8, 8], dtype=torch.int32)
    ids = sequence_ids_of(cu_seqlens, 10, cu_seqlens_padded=padded)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[0, 0, 0, -1, 1, -1, 3, 3, -1, -1]]
    assert sequence_ids_of(cu_seqlens[None], 6).tolist() == [[0, 0, 0, 1, 3, 3]]
    assert sequence_ids_of(cu_seqlens.to("meta"), 10).shape == (1, 10)


def test_statistics_are_finite_where_nothing_is_valid():
    """A sequence without tokens has mean 0; padding gets 0, a valid token without sequence NaN."""
    valid = torch.tensor([[True, True, False, True]])
    sequences = TokensOfSequences(valid, torch.tensor([0, 0, 2, 2]), 2, None)
    mean = sequences.mean(torch.tensor([[1.0, 4.0, 0.0, 8.0]]))
    assert mean.tolist() == [2.5, 0.0]
    spread = sequences.spread(mean)[0]
    assert spread[:3].tolist() == [2.5, 2.5, 0.0] and spread[3].isnan()


def test_gspo_has_the_gradient_of_the_paper():
    """A and weight equal within a sequence: that of s itself, differentiated through all tokens."""
    generator = torch.Generator().manual_seed(5)
    x, old = torch.randn(2, 6, 8, generator=generator, dtype=F64)
    a = torch.randn(6, 1, generator=generator, dtype=F64).expand(6, 8)
    weights = torch.rand(6, 1, generator=generator, dtype=F64).expand(6, 8)
    mask = torch.rand(6, 8, generator=generator) < 0.8
    _, found = run(gspo, x, old, a, mask, weights)
    leaf = x.clone().requires_grad_()
    total = torch.zeros((), dtype=F64)
    for i in range(6):
        s = torch.exp((leaf[i] - old[i])[mask[i]].mean())
        surrogate = torch.maximum(-a[i, 0] * s, -a[i, 0] * s.clamp(0.8, 1.3))
        total = total + weights[i, 0] * mask[i].sum() * surrogate
    total.backward()
    torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-15)
    assert (found == 0).all(dim=1).any() and (found != 0).any(dim=1).any()  # some are clipped


def test_gmpo_at_ratio_one_has_the_policy_gradient():
    """A equal within a sequence, weights equal: n losses of A / n each."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, 7, generator=generator, dtype=F64)
    a = torch.randn(4, 1, generator=generator, dtype=F64).expand(4, 7)
    mask = torch.rand(4, 7, generator=generator) < 0.8
    _, found = run(gmpo, x, x.clone(), a, mask, torch.ones(4, 7))
    torch.testing.assert_close(found, -a * mask, rtol=1e-12, atol=0)


def test_gradcheck_of_gmpo_packed():
    """Finite differences, through the sums over sequences."""
    sequences = make_sequences([(4, 1), (0, 0), (5, 0), (1, 2)], 0)
    x, old, a, mask, _ = as_packed(sequences, 1)
    x = torch.nan_to_num(x).requires_grad_()
    cu_seqlens = torch.tensor([0, 5, 5, 10, 13])
    ids = sequence_ids_of(cu_seqlens, 14)
    assert torch.autograd.gradcheck(
        lambda x: gmpo(x, old, a, mask, sequence_ids=ids, num_sequences=4), [x]
    )


@pytest.mark.parametrize("name", LOSSES)
def test_packed_needs_no_value_on_the_host(name):
    x, old, a, mask, _ = (f.to("meta") for f in as_packed(make_sequences([(4, 0), (3, 0)], 0), 1))
    ids = sequence_ids_of(torch.tensor([0, 4, 7], device="meta"), 8)
    assert LOSSES[name][0](x, old, a, mask, sequence_ids=ids, num_sequences=2).shape == (1, 8)


def test_wrong_sequence_arguments_are_refused():
    x, old, a, mask, _ = as_packed(make_sequences([(4, 0), (3, 0)], 0), 0)
    mask = torch.ones_like(mask)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    with pytest.raises(TypeError, match=r"cu_seqlens.numel\(\) - 1; got None"):
        gspo(x, old, a, mask, sequence_ids=ids)
    with pytest.raises(TypeError, match="an int and not a tensor"):
        gspo(x, old, a, mask, sequence_ids=ids, num_sequences=torch.tensor(2))
    with pytest.raises(
        ValueError, match="num_sequences=2 needs sequence_ids. Without them each row"
    ):
        gspo(x, old, a, mask, num_sequences=2)
    with pytest.raises(ValueError, match="go up to 1, but num_sequences is 1"):
        gmpo(x, old, a, mask, sequence_ids=ids, num_sequences=1)
    with pytest.raises(ValueError, match="valid token has a negative sequence id"):
        tis(x, old, a, mask, sequence_ids=ids - 1, num_sequences=2)
    with pytest.raises(ValueError, match=r"sequence_ids has shape \(7,\), but loss_mask \(1, 7\)"):
        gspo(x, old, a, mask, sequence_ids=ids[0], num_sequences=2)
    with pytest.raises(TypeError, match="sequence_ids must hold integers, got torch.float32"):
        gspo(x, old, a, mask, sequence_ids=ids.float(), num_sequences=2)
    with pytest.raises(ValueError, match="cu_seqlens has 3 entries and cu_seqlens_padded 2"):
        sequence_ids_of(torch.tensor([0, 4, 7]), 7, cu_seqlens_padded=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most"):
        sequence_ids_of(torch.tensor([0, 4, 9]), 7)
