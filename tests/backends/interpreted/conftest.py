"""What all tests in the interpreter need."""

import pytest
import torch

from coneheads.backends import triton


@pytest.fixture(autouse=True)
def _interpreter():
    if not triton.interpreted():
        pytest.fail("these tests need TRITON_INTERPRET=1 in the environment")


@pytest.fixture
def poisoned():
    """Memory that torch does not initialise is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
