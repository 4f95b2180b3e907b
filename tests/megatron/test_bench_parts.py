"""The parts of the bench that need no ranks: layouts, batches, the reference loss, the shim."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing import (
    GlobalBatch,
    Layout,
    TinyGPT,
    check_p2p_is_safe,
    cpu_shim_installed,
    install_cpu_shim,
    ragged_batch,
    reference_loss,
    relative_error,
    uninstall_cpu_shim,
)
from megatron_lossagg.testing.gradients import Shard, assemble
from megatron_lossagg.testing.layout.token_positions import zigzag_positions
from megatron_lossagg.testing.model.tiny_gpt import transformer_config


@pytest.mark.parametrize(
    ("text", "layout", "canonical"),
    [
        ("PP=2 VPP=2 C=2 D=1 M=4", Layout(pp=2, vpp=2, cp=2, num_microbatches=4), None),
        ("d=4,m=2", Layout(dp=4, num_microbatches=2), "D=4 M=2"),
        ("TP=2 SP=1", Layout(tp=2, sequence_parallel=True), "TP=2 SP=1 M=1"),
        ("D=1", Layout(), "D=1 M=1"),
        ("EP=2 D=4", Layout(dp=4, ep=2), "EP=2 D=4 M=1"),
        ("TP=2 EP=2", Layout(tp=2, ep=2), "TP=2 EP=2 M=1"),
    ],
)
def test_layout_text(text, layout, canonical):
    """A layout is read from its text, and its own text gives it back."""
    assert Layout.parse(text) == layout
    assert Layout.parse(str(layout)) == layout
    assert str(layout) == (canonical or "PP=2 VPP=2 C=2 M=4")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("PP=2 X=3", "cannot read 'X=3' in 'PP=2 X=3'; expected pairs like"),
        ("PP", "cannot read 'PP'"),
        ("PP=two", "cannot read 'PP=two'"),
        ("", "got ''; expected"),
        ("D=2 D=4", "D is given twice"),
        ("D=0", "dp must be an int of at least 1, got 0"),
        ("VPP=2", "vpp=2 needs pp > 1, got pp=1"),
        ("PP=4 VPP=2 M=2", "needs num_microbatches >= pp, got num_microbatches=2 and pp=4"),
        ("SP=1", "sequence_parallel needs tp > 1"),
        ("EP=3 D=2 C=2 TP=2", "ep must divide dp \\* cp \\* tp = 8, .* got ep=3"),
        ("EP=2 PP=2", "ep must divide dp \\* cp \\* tp = 1"),
    ],
)
def test_bad_layouts(text, match):
    """What was passed and what was expected is in the message."""
    with pytest.raises(ValueError, match=match):
        Layout.parse(text)


def test_world_size():
    """D * TP * PP * C; virtual stages and expert parallelism need no ranks."""
    assert Layout(dp=2, tp=3, pp=5, vpp=2, cp=7, ep=6, num_microbatches=5).world_size == 210


def test_global_batch_partitions_its_rows():
    """Microbatches are new dicts of new tensors, and together they are the rows."""
    batch = ragged_batch(12, dp=2, num_microbatches=3, extra_fields=("advantages",))
    parts = [m for rank in range(2) for m in batch.microbatches(rank)]
    for name, rows in batch.rows.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), rows)
    parts[0]["tokens"].zero_()
    parts[0].clear()
    assert batch.rows["tokens"][:2].any()
    assert batch.split(3, 2).microbatches(2)[1]["tokens"].shape == (2, 16)


@pytest.mark.parametrize(
    ("assignment", "match"),
    [
        ((((0,), (1,), (2,)), ()), r"every data-parallel rank needs a microbatch, got \[3, 0\]"),
        ((((0,), (1, 1)),), r"each of the rows 0\.\.2 once, got \[0, 1, 1\]"),
    ],
)
def test_bad_assignments(assignment, match):
    """Each row once, and no rank without a microbatch; their number may differ."""
    with pytest.raises(ValueError, match=match):
        GlobalBatch({"tokens": torch.zeros(3, 4)}, assignment)


def test_ragged_batch_is_nasty_and_deterministic():
    """What its docstring promises, for the assignment that is given."""
    batch = ragged_batch(16, dp=4, num_microbatches=2, extra_fields=("old_log_probs",))
    mask = batch.rows["loss_mask"]
    counts = [sum(int(m["loss_mask"].sum()) for m in batch.microbatches(r)) for r in range(4)]
    assert len(set(counts)) == 4
    assert mask[14:].sum() == 0 and (mask[:14].sum(dim=1) == 0).sum() == 1
    lengths = mask.sum(dim=1)
    assert len(set(lengths.tolist())) > 4
    has_hole = [bool((row.nonzero().flatten().diff() > 1).any()) for row in mask]
    assert any(has_hole)
    assert torch.equal(batch.rows["tokens"][:, 1:], batch.rows["labels"][:, :-1])
    assert abs(batch.rows["old_log_probs"].mean() + math.log(32)) < 0.1
    again = ragged_batch(16, dp=4, num_microbatches=2, extra_fields=("old_log_probs",))
    assert all(torch.equal(batch.rows[name], again.rows[name]) for name in batch.rows)
    other = ragged_batch(16, dp=4, num_microbatches=2, seed=1)
    assert not torch.equal(other.rows["tokens"], batch.rows["tokens"])


_LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]])
_MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "arguments", "expected"),
    [
        ("token-mean", {}, 453 / 5),
        ("token-sum", {}, 453),
        ("seq-mean-token-sum", {}, 453 / 2),
        ("seq-mean-token-sum", {"sequence_count": "nominal"}, 453 / 3),
        ("seq-mean-token-mean", {}, (5 / 2 + 448 / 3) / 2),
        ("seq-mean-token-mean", {"sequence_count": "nominal"}, (5 / 2 + 448 / 3) / 3),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 10}, 45.3),
        (
            "seq-mean-token-sum-norm",
            {"loss_scale_factor": 10, "norm_semantics": "seq-mean"},
            45.3 / 2,
        ),
        ("token-mean", {"sample_mask": torch.tensor([1, 1, 0])}, 5 / 2),
        (
            "seq-mean-token-sum",
            {"sample_mask": torch.tensor([0, 1, 1]), "sequence_count": "nominal"},
            448 / 2,
        ),
        ("unit-mean-token-mean", {"unit_ids": torch.tensor([0, 0, 1])}, (5 / 2 + 448 / 3) / 2),
        ("unit-mean-token-mean", {"unit_ids": torch.tensor([0, 1, 0])}, 453 / 5),
        (
            "unit-mean-seq-mean-token-mean",
            {"unit_ids": torch.tensor([0, 1, 0])},
            (5 / 2 + 448 / 3) / 2,
        ),
        (lambda n_s, c: n_s / c.num_seqs + c.num_tokens, {}, 5 * (2 / 2 + 5) + 448 * (3 / 2 + 5)),
        (
            lambda n_s, c: c.num_valid_seqs / c.num_seqs,
            {"sequence_count": "nominal"},
            453 * 2 / 3,
        ),
    ],
)
def test_reference_loss_by_hand(mode, arguments, expected):
    """Numbers worked out on paper."""
    assert reference_loss(_LOSSES, _MASK, mode, **arguments).item() == pytest.approx(expected)


def test_reference_loss_of_nothing_is_zero():
    """Also where masked losses are NaN."""
    losses = torch.full((2, 3), math.nan)
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert reference_loss(losses, torch.zeros(2, 3), mode).item() == 0
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        reference_loss(losses, torch.zeros(2, 3), "mean")


def test_relative_error():
    """A norm over the whole model, not a mean of norms; absolute against zero; NaN stays NaN."""
    expected = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    got = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.5]])}
    assert relative_error(got, expected) == pytest.approx(0.1)
    zero = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert relative_error(expected, zero) == 5.0
    assert math.isnan(relative_error({**got, "a": torch.tensor([math.nan])}, expected))
    with pytest.raises(ValueError, match=r"only in expected: \['b'\]"):
        relative_error({"a": got["a"]}, expected)
    with pytest.raises(ValueError, match=r"b has shape \(1,\), expected \(1, 1\)"):
        relative_error({**got, "b": torch.zeros(1)}, expected)


def test_assemble_joins_shards_and_checks_replicas():
    """Shards of a row-split weight are joined in the order of the ranks, not of arrival."""
    whole = torch.arange(6.0).view(2, 3)
    parts = [
        ("w", Shard(whole[:, 2:], 1, 1, 1)),
        ("w", Shard(whole[:, :2], 1, 0, 0)),
        ("bias", Shard(torch.tensor([1.0, 2.0]), None, 0, 0)),
        ("bias", Shard(torch.tensor([1.0, 2.0]), None, 1, 1)),
    ]
    assert torch.equal(assemble(parts)["w"], whole)
    parts[-1] = ("bias", Shard(torch.tensor([1.0, 2.5]), None, 1, 1))
    with pytest.raises(LossAggError, match="gradient of bias differs .* 0 and 1 by up to 0.5"):
        assemble(parts)
    assert torch.equal(assemble(parts, tolerance=0.5)["bias"], torch.tensor([1.0, 2.0]))


def test_zigzag_positions():
    """Rank r holds pieces r and 2C-1-r, as Megatron's slicer cuts."""
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="multiple of 2 \\* cp_size = 4, got 6"):
        zigzag_positions(6, 2, 0)


def test_unsafe_pipeline_transfers_are_refused(rank_pool):
    """The two settings that give wrong numbers without an error, and what the bench sets itself."""

    def config(batch, overlap, deallocate):
        return SimpleNamespace(
            batch_p2p_comm=batch, overlap_p2p_comm=overlap, deallocate_pipeline_outputs=deallocate
        )

    for batch, overlap in ((True, False), (True, True), (False, False)):
        with pytest.raises(LossAggError, match="Pipeline size 2 with virtual .* swap activations"):
            check_p2p_is_safe(config(batch, overlap, False), 2, 2, "gloo")
    with pytest.raises(LossAggError, match="over gloo sends from memory that is already freed"):
        check_p2p_is_safe(config(False, True, True), 4, 2, "gloo")
    check_p2p_is_safe(config(False, True, True), 2, 2, "nccl")
    check_p2p_is_safe(config(True, False, True), 2, 1, "gloo")
    check_p2p_is_safe(config(True, False, False), 4, 2, "gloo")
    rank_pool.run(_check_the_bench_is_safe, world_size=1)


def _check_the_bench_is_safe():
    for text in ("PP=2 VPP=2 M=2", "PP=2 M=2", "PP=4 VPP=2 M=4"):
        layout = Layout.parse(text)
        config = transformer_config(TinyGPT(num_layers=8), layout)
        check_p2p_is_safe(config, layout.pp, layout.vpp, "gloo")


@pytest.fixture
def shim():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is available: the shim does nothing")
    was_installed = cpu_shim_installed()
    assert install_cpu_shim() and install_cpu_shim()
    yield
    if not was_installed:
        uninstall_cpu_shim()


class _BackwardAllocates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full([], 2.0, device="cuda")


def test_shim_puts_cuda_tensors_on_the_cpu(shim):
    """All the ways in which code names the device."""
    device = torch.cuda.current_device()
    tensors = [
        torch.empty(3, device=device),
        torch.zeros([], dtype=torch.int, device="cuda"),
        torch.ones(2).cuda().to("cuda:0", torch.float64).to(torch.device("cuda", 0)).to(device),
        torch.ones(2).new_zeros(2, device="cuda"),
        torch.nn.Linear(2, 2, device="cuda").cuda().weight,
        torch.empty(2, pin_memory=True).pin_memory(),
    ]
    with torch.device("cuda"):
        tensors.append(torch.ones(1))
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    x = torch.ones(2, requires_grad=True)
    _BackwardAllocates.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_shim_stands_in_for_calls(shim):
    """Streams, events, synchronisation and random state can be used; facts are not faked."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record(torch.cuda.current_stream())
        stream.wait_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    torch.cuda.manual_seed(1)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


def test_shim_names_cuda_types(shim):
    """Megatron's optimizers compare this text."""
    x = torch.ones(2)
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert not x.is_cuda


def test_shim_can_be_removed_and_put_back(shim):
    """Removing restores torch; a mode entered later must be left first."""
    with torch.device("cpu"), pytest.raises(LossAggError, match="innermost TorchFunctionMode"):
        uninstall_cpu_shim()
    uninstall_cpu_shim()
    uninstall_cpu_shim()
    assert not cpu_shim_installed()
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")
    assert install_cpu_shim()
    assert torch.ones(1, device="cuda").device.type == "cpu"


def test_import_does_not_need_megatron():
    """The bench is cheap to import: Megatron comes with the first model."""
    code = "import sys, megatron_lossagg.testing; assert 'megatron.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
