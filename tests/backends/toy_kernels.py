"""Toy sources that stand for the kernels, and what tests say of a build."""

import ctypes
import shutil
import subprocess
import sys

from coneheads.backends import compiler

REAL_COMPILER = next(filter(None, map(shutil.which, compiler.NAMES)), None)
SOURCE = '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
SWITCHES = ("CXX", "CONEHEADS_CPP", "CONEHEADS_CPU_LEVEL", "CONEHEADS_CXXFLAGS", "CONEHEADS_BUILD_TIMEOUT")
START = "import pathlib, sys; from coneheads.backends import build; build.SOURCES = pathlib.Path(sys.argv[1])\n"


def answer(status):
    """What the toy library answers: proof that it was loaded."""
    assert status.available, status.reason
    assert status.reason is None
    return ctypes.CDLL(str(status.library)).answer()


def assert_told(status, *parts):
    """The kernels are not there, and one line says why, what serves instead and what would help."""
    assert not status.available
    assert status.library is None
    for part in (*parts, "so backend='auto' runs attention on the chunked backend, which is slower; "):
        assert part in status.reason
    assert "\n" not in status.reason
    assert len(status.reason) < 900


def start(sources, code, **options):
    """Another Python, whose kernels are these sources."""
    return subprocess.Popen([sys.executable, "-c", START + code, str(sources)], text=True, **options)
