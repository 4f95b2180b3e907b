"""Settings of the property tests, and fixtures of `torch.compile`."""

import pytest
from hypothesis import settings

from megatron_lossagg.objective.compile import compiler

# The same examples in every run, no deadline on a busy machine.
settings.register_profile(
    "reproducible", deadline=None, derandomize=True, database=None, max_examples=50
)
settings.load_profile("reproducible")


@pytest.fixture
def forget_graphs():
    import torch._dynamo  # here, as it takes a second

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counter(monkeypatch):
    """Counts graphs; without a C++ compiler."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiler, "BACKEND", counter)
    return counter
