"""What all tests in the interpreter need."""

import pytest

from coneheads.backends import triton


@pytest.fixture(autouse=True)
def _interpreter():
    if not triton.interpreted():
        pytest.fail("these tests need TRITON_INTERPRET=1 in the environment")
