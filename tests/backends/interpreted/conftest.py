"""What all tests in the interpreter need."""

import contextlib
import os

import pytest

from coneheads.backends import triton


@pytest.fixture(autouse=True)
def _kernels_run():
    """In the interpreter or, with EMULATED_ARCH (80, 90 or 100), on the emulated GPU."""
    arch = os.environ.get("EMULATED_ARCH")
    if arch is None and not triton.interpreted():
        pytest.fail("these tests need TRITON_INTERPRET=1 in the environment")
    with contextlib.ExitStack() as stack:
        if arch is not None:
            from tests.backends.emulated import kernels  # compiles: it cannot be imported in the interpreter

            stack.enter_context(kernels.on(int(arch)))
        yield
