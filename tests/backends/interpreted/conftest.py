"""What all tests in the interpreter need."""

import dataclasses
import os

import pytest

from coneheads import backends
from coneheads.backends import triton


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    arch = int(os.environ.get("EMULATED_ARCH", "0"))
    if arch:
        from tests.backends.emulated.kernels import on

        served = tuple(
            dataclasses.replace(b, devices=("cuda", "cpu"), available=lambda: True) if b.name == "triton" else b
            for b in backends.BACKENDS
        )
        monkeypatch.setattr(backends, "BACKENDS", served)
        with on(arch):
            yield
        return
    if not triton.interpreted():
        pytest.fail("these tests need TRITON_INTERPRET=1 in the environment")
    yield
