"""Sources, a cache and compilers for the tests of building; poisoned memory for those of kernels."""

import shlex
import tempfile

import pytest
import torch

from coneheads.backends import build
from tests.backends.toy_kernels import REAL_COMPILER, SOURCE, SWITCHES


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A directory with toy sources; the cache, the temporary directory and the memo are the test's own."""
    if REAL_COMPILER is None:
        pytest.skip("there is no C++ compiler")
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONEHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "_memo", build._Memo())
    for name in ("tmp", "sources"):
        (tmp_path / name).mkdir()
    (tmp_path / "sources/attention.cpp").write_text(SOURCE)
    (tmp_path / "sources/answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
    return tmp_path / "sources"


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Makes a shell script the compiler. ``runs()`` counts the compilations, which is all calls but --version."""
    calls = tmp_path / "calls"

    def make(body, version="toy compiler 1"):
        script = tmp_path / "fake compiler"
        script.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n'
            f"echo compiles >> {shlex.quote(str(calls))}\n"
            'for argument; do [ "$previous" = -o ] && output=$argument; previous=$argument; done\n'
            f"{body}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", shlex.quote(str(script)))
        return script

    make.runs = lambda: len(calls.read_text().splitlines()) if calls.exists() else 0
    return make


@pytest.fixture
def poisoned():
    """Memory that torch does not initialise is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
