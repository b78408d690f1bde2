"""Compilers that are missing or misbehave are told of in one sentence; levels and switches do as documented.

Shell scripts stand for the compilers.
"""

import os
import platform
import shlex
import time
import warnings
from pathlib import Path

import pytest

from coneheads.backends import build, compiler
from tests.backends.toy_kernels import REAL_COMPILER, SOURCE, SWITCHES, answer, assert_told

# Compilers


def test_no_compiler_is_told(sources, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status = build.attempt(sources)
    assert_told(status, "no C++ compiler was found", "c++, g++, clang++", "install g++ or clang++")
    assert status.compiler is None


def test_without_a_compiler_a_library_in_the_cache_will_do(sources, monkeypatch, tmp_path):
    built = build.attempt(sources)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = build.attempt(sources)
    assert answer(found) == 42
    assert found.library == built.library
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    assert_told(build.attempt(sources), "no C++ compiler was found")


def test_compiler_is_the_first_on_the_path(sources, monkeypatch, tmp_path):
    for name in ("g++", "clang++"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} of the test\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.find_compiler().name == "g++ of the test"


def test_cxx_may_hold_arguments(sources, monkeypatch):
    (sources / "attention.cpp").write_text(SOURCE.replace("ANSWER", "FROM_CXX"))
    monkeypatch.setenv("CXX", f"env NAME=value {REAL_COMPILER} '-DFROM_CXX=(40 + 3)'")
    assert answer(build.attempt(sources)) == 43


@pytest.mark.parametrize(
    ("cxx", "told"),
    [
        ("/nowhere/c++ -v", "/nowhere/c++, is not there"),
        ("'c++", "CXX cannot be split into words (No closing quotation)"),
        ("broken", "broken cannot be run: Exec format error"),
    ],
)
def test_cxx_that_cannot_be_run_is_told_and_not_replaced(sources, monkeypatch, tmp_path, cxx, told):
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", cxx)
    assert_told(build.attempt(sources), told, "CXX")


def test_error_of_the_compiler_is_told_by_its_first_line_and_kept_whole(sources):
    (sources / "attention.cpp").write_text('#warning "beside the point"\n#include "missing.h"\n')
    status = build.attempt(sources)
    assert_told(status, "exit status 1: ", "attention.cpp:2:10: fatal error: missing.h", "CONEHEADS_CPP=off")
    log = Path(status.reason.partition("its whole output is in ")[2].partition(")")[0])
    assert log.parent == sources.parent / "cache"
    assert "beside the point" in log.read_text()
    assert "-DTORCH_TARGET_VERSION" in log.read_text()


def test_error_of_the_linker_is_told(sources, monkeypatch):
    monkeypatch.setenv("CONEHEADS_CXXFLAGS", "-lmissing")
    assert_told(build.attempt(sources), "cannot find -lmissing")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("exit 1", "failed with exit status 1: it said nothing"),
        ("kill -9 $$", "failed with exit status -9"),
        ("true", "ended well but wrote no whole library"),
        (f'{REAL_COMPILER} "$@"; truncate -s 5000 "$output"', "ended well but wrote no whole library"),
        ("echo garbage > $output", "cannot be loaded"),
        ("head -c 5000 /dev/urandom > $output", "cannot be loaded"),
        (': > "$output"', "cannot be loaded"),
        ("printf 'error: %5000d' 1; exit 1", "..."),
        (r"printf '\377\0'; exit 1", "failed with exit status 1"),
    ],
)
def test_broken_compiler_is_told_and_leaves_no_library(sources, fake_compiler, body, told):
    fake_compiler(body)
    assert_told(build.attempt(sources), told, "name a working compiler in CXX")
    assert not list((sources.parent / "cache").glob("*.so"))
    assert not list((sources.parent / "cache").glob("building-*"))


@pytest.mark.parametrize("when", ["at --version", "at work"])
def test_compiler_that_hangs_is_ended_with_its_children(sources, fake_compiler, monkeypatch, tmp_path, when):
    hang = f"sleep 1000 & echo $! > {shlex.quote(str(tmp_path / 'child'))}; wait"
    script = fake_compiler(hang)
    if when == "at --version":
        script.write_text(f"#!/bin/sh\n{hang}\n")
    monkeypatch.setenv("CONEHEADS_BUILD_TIMEOUT", "1.5")
    assert_told(build.attempt(sources), "did not end within 1.5 s", "CONEHEADS_BUILD_TIMEOUT")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "a child of the compiler lives on"
        time.sleep(0.02)
    assert not list((tmp_path / "cache").glob("building-*"))


def test_missing_sources_are_told(sources):
    (sources / "attention.cpp").unlink()
    assert_told(build.attempt(sources), "attention.cpp cannot be read", "install coneheads again")


# Levels


def test_level_is_the_best_that_the_cpu_has(sources, monkeypatch):
    """The compiler's own runtime asks the CPU; torch's switch has no say."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    if platform.machine() != "x86_64":
        assert compiler.levels_of_this_cpu() == ("portable",)
        return
    asks = " && ".join(f'__builtin_cpu_supports("{name}")' for name in ("avx512dq", "avx512bw", "avx512vl"))
    asks = f'{asks} ? 0 : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 2'
    (sources / "answer.h").write_text(f"#define ANSWER {asks}\n")
    status = build.attempt(sources)
    assert status.level == compiler.LEVELS[answer(status)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one level")
@pytest.mark.parametrize("level", compiler.LEVELS)
def test_level_sets_instructions_and_a_macro(sources, monkeypatch, level):
    monkeypatch.setattr(compiler, "levels_of_this_cpu", lambda: compiler.LEVELS)  # nothing of it is run here
    monkeypatch.setenv("CONEHEADS_CPU_LEVEL", level)
    (sources / "answer.h").write_text("""
#if defined(CONEHEADS_LEVEL_AVX512)
#define ANSWER __AVX512F__ + __AVX512VL__ + __AVX512BW__ + __AVX512DQ__ + __AVX2__ + __FMA__ + __F16C__
#elif defined(CONEHEADS_LEVEL_AVX2) && !defined(__AVX512F__)
#define ANSWER __AVX2__ + __FMA__ + __F16C__
#elif defined(CONEHEADS_LEVEL_PORTABLE) && !defined(__AVX__)
#define ANSWER 0
#endif
static_assert(__cplusplus >= 201703L);
""")
    assert answer(build.attempt(sources)) == {"avx512": 7, "avx2": 3, "portable": 0}[level]


def test_level_that_the_cpu_lacks_is_told_before_anything_is_built(sources, monkeypatch, fake_compiler):
    fake_compiler("exit 1")
    monkeypatch.setattr(compiler, "levels_of_this_cpu", lambda: ("avx2", "portable"))
    monkeypatch.setenv("CONEHEADS_CPU_LEVEL", "avx512")
    status = build.attempt(sources)
    assert_told(status, "instructions that this CPU does not have", "avx2 or portable")
    assert status.level == "avx512"
    monkeypatch.setenv("CONEHEADS_CPU_LEVEL", "sse9")
    assert_told(build.attempt(sources), "CONEHEADS_CPU_LEVEL=sse9 is none of avx512, avx2, portable")
    assert fake_compiler.runs() == 0


# Switches


def test_off_switches_the_kernels_off_without_a_warning(sources, monkeypatch, fake_compiler):
    fake_compiler("exit 1")
    monkeypatch.setenv("CONEHEADS_CPP", "off")
    assert_told(build.status(), "CONEHEADS_CPP=off")
    with warnings.catch_warnings(record=True) as heard:
        build.warn_once()
    assert not heard
    assert fake_compiler.runs() == 0


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("CONEHEADS_CPP", "false", "CONEHEADS_CPP=false is neither on nor off"),
        ("CONEHEADS_CXXFLAGS", "-DX='", "CONEHEADS_CXXFLAGS cannot be split"),
        ("CONEHEADS_BUILD_TIMEOUT", "soon", "CONEHEADS_BUILD_TIMEOUT=soon is not a number of seconds"),
        ("CONEHEADS_BUILD_TIMEOUT", "-1", "CONEHEADS_BUILD_TIMEOUT=-1 is not a number of seconds"),
    ],
)
def test_wrong_value_of_a_switch_is_told(sources, monkeypatch, variable, value, told):
    monkeypatch.setenv(variable, value)
    assert_told(build.attempt(sources), told)


def test_empty_switches_are_as_good_as_none(sources, monkeypatch):
    for name in SWITCHES:
        monkeypatch.setenv(name, "")
    assert answer(build.attempt(sources)) == 42


def test_added_flags_come_last(sources, monkeypatch):
    monkeypatch.setenv("CONEHEADS_CXXFLAGS", "-O0 -DFLAG='40 + 5'")
    (sources / "answer.h").write_text("#ifndef __OPTIMIZE__\n#define ANSWER FLAG\n#endif\n")
    assert answer(build.attempt(sources)) == 45
