"""The kernels are built once, by one process, and a cache that is damaged or cannot be written does no harm."""

import errno
import fcntl
import os
import platform
import pty
import shlex
import signal
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from coneheads.backends import build, compiler
from tests.backends.toy_kernels import REAL_COMPILER, SOURCE, answer, assert_told, start

# The cache


def test_first_use_builds_and_the_next_one_finds_the_library(sources, fake_compiler):
    fake_compiler(f'exec {REAL_COMPILER} "$@"', version="toy compiler 1\nof many lines")
    first, second = build.attempt(sources), build.attempt(sources)
    assert answer(first) == answer(second) == 42
    assert first.built_seconds > 0
    assert second.built_seconds is None
    assert first.library == second.library
    assert first.compiler == "toy compiler 1"
    assert first.level == compiler.levels_of_this_cpu()[0]
    assert fake_compiler.runs() == 1
    assert sorted(path.suffix for path in first.library.parent.iterdir()) == [".lock", ".sha256", ".so"]


@pytest.mark.parametrize("change", ["source", "header", "new header", "flags", "level", "compiler", "torch", "machine"])
def test_any_change_gives_a_new_library(sources, fake_compiler, monkeypatch, change):
    body = f'exec {REAL_COMPILER} -shared -fPIC -x c++ -o "$output" {shlex.quote(str(sources / "attention.cpp"))}'
    fake_compiler(body)
    monkeypatch.setattr(compiler, "levels_of_this_cpu", lambda: ("avx2", "portable"))
    before = build.attempt(sources)
    {
        "source": lambda: (sources / "attention.cpp").write_text(f"{SOURCE}// new\n"),
        "header": lambda: (sources / "answer.h").write_text("#define ANSWER 43\n"),
        "new header": lambda: (sources / "another.h").write_text(""),
        "flags": lambda: monkeypatch.setenv("CONEHEADS_CXXFLAGS", "-g -DNAME='a b'"),
        "level": lambda: monkeypatch.setenv("CONEHEADS_CPU_LEVEL", "portable"),
        "compiler": lambda: fake_compiler(body, version="toy compiler 2"),
        "torch": lambda: monkeypatch.setattr(build.torch, "__version__", "2.99.0"),
        "machine": lambda: monkeypatch.setattr(platform, "machine", lambda: "toy"),
    }[change]()
    after = build.attempt(sources)
    assert answer(before) == 42
    assert answer(after) == (43 if change == "header" else 42)
    assert before.library != after.library
    assert before.library.parent == after.library.parent


def test_cache_is_where_the_environment_says(sources, monkeypatch):
    def first():
        return next(build._cache_directories())

    monkeypatch.setenv("HOME", "/home/toy")
    assert first() == sources.parent / "cache"
    monkeypatch.setenv("CONEHEADS_CACHE", "~/there")
    assert first() == Path("/home/toy/there")
    monkeypatch.delenv("CONEHEADS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert first() == Path("/xdg/coneheads")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert first() == Path("/home/toy/.cache/coneheads")


@pytest.mark.parametrize("cache", ["/dev/null/cache", "/proc/cache"])
def test_cache_that_cannot_be_written_is_replaced_by_a_private_directory(sources, monkeypatch, cache):
    monkeypatch.setenv("CONEHEADS_CACHE", cache)
    first, second = build.attempt(sources), build.attempt(sources)
    assert answer(first) == 42
    assert first.library.parent == Path(tempfile.gettempdir(), f"coneheads-{os.getuid()}")
    assert stat.S_IMODE(first.library.parent.stat().st_mode) == 0o700
    assert second.built_seconds is None


@pytest.mark.parametrize("trap", ["open to all", "a link", "a file", "of another user"])
def test_directory_that_others_could_have_filled_is_not_used(sources, monkeypatch, trap):
    monkeypatch.setenv("CONEHEADS_CACHE", "/dev/null/cache")
    if trap == "of another user":
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    guessed = Path(tempfile.gettempdir(), f"coneheads-{os.getuid()}")
    if trap == "a link":
        guessed.symlink_to(sources)
    elif trap == "a file":
        guessed.write_text("")
    else:
        guessed.mkdir()
        guessed.chmod(0o777 if trap == "open to all" else 0o700)
    status = build.attempt(sources)
    assert answer(status) == 42
    assert status.library.parent != guessed
    assert stat.S_IMODE(status.library.parent.stat().st_mode) == 0o700
    assert trap == "a file" or not list(guessed.glob("*.so"))


def test_full_disk_is_a_cache_that_cannot_be_written(sources, fake_compiler):
    full = "as: cannot write: No space left on device"
    fake_compiler(f'case "$output" in */cache/*) echo "{full}"; exit 1;; esac; exec {REAL_COMPILER} "$@"')
    status = build.attempt(sources)
    assert answer(status) == 42
    assert Path(tempfile.gettempdir()) in status.library.parents
    assert fake_compiler.runs() == 2


def test_no_directory_to_write_to_is_told(sources, monkeypatch):
    monkeypatch.setenv("CONEHEADS_CACHE", "/dev/null/cache")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/tmp")
    assert_told(build.attempt(sources), "/dev/null/cache: Not a directory", "set CONEHEADS_CACHE")


@pytest.mark.parametrize("damage", ["cut short", "text", "empty", "no checksum", "empty checksum", "not loadable"])
def test_damaged_library_is_built_again(sources, fake_compiler, monkeypatch, tmp_path, damage):
    fake_compiler(f'exec {REAL_COMPILER} "$@"')
    name = build.attempt(sources).library.name
    # Under a new path, because the system takes a path that it has loaded for the library that it has loaded.
    library = (tmp_path / "cache").rename(tmp_path / "moved") / name
    monkeypatch.setenv("CONEHEADS_CACHE", str(library.parent))
    checksum = library.with_suffix(".sha256")
    whole = library.read_bytes()
    if damage == "no checksum":
        checksum.unlink()
    elif damage == "empty checksum":
        checksum.write_text("")
    else:
        content = {"cut short": whole[: len(whole) // 2], "empty": b""}.get(damage, b"a text")
        library.unlink()  # the old file is mapped in this process
        library.write_bytes(content)
    if damage == "not loadable":
        checksum.write_bytes(build._checksum(library))
    status = build.attempt(sources)
    assert answer(status) == 42
    assert status.library == library
    assert status.built_seconds > 0
    assert fake_compiler.runs() == 2
    assert build.attempt(sources).built_seconds is None


def test_only_what_is_old_and_not_among_the_newest_is_removed(sources, monkeypatch):
    monkeypatch.setattr(build, "LIBRARIES_KEPT", 3)
    cache = sources.parent / "cache"
    cache.mkdir()
    (cache / "notes.txt").touch()
    for days in (1, 20, 40, 60):
        (cache / f"building-{days}").mkdir()
        (cache / f"building-{days}/attention.so").touch()
        for suffix in ("so", "sha256", "lock"):
            (cache / f"attention-avx2-{days}.{suffix}").touch()
        (cache / f"attention-failed-{days}.log").touch()
        for path in cache.glob(f"*-{days}*"):
            os.utime(path, (time.time() - days * 86400 + 60,) * 2)
    os.utime(cache / "notes.txt", (0, 0))
    library = build.attempt(sources).library
    left = {path.name for path in cache.iterdir() if path.stem != library.stem}
    kept = {f"attention-avx2-{days}.{suffix}" for days in (1, 20) for suffix in ("so", "sha256", "lock")}
    assert left == kept | {"attention-failed-1.log", "attention-failed-20.log", "building-1", "notes.txt"}


# Several processes


def test_of_four_processes_at_once_one_builds_and_all_load(sources, fake_compiler):
    fake_compiler(f'sleep 0.5; exec {REAL_COMPILER} "$@"')
    code = "build.load(); import ctypes; status = build.status()\n"
    code += "print(ctypes.CDLL(str(status.library)).answer(), status.built_seconds is not None)"
    processes = [start(sources, code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    outputs = sorted(process.communicate(timeout=60) for process in processes)
    assert outputs == [("42 False\n", "")] * 3 + [("42 True\n", "")]  # nothing on stderr: it is not a terminal
    assert fake_compiler.runs() == 1


def test_build_that_is_killed_leaves_nothing_harmful(sources, fake_compiler, tmp_path):
    fake_compiler(f'echo half > "$output"; touch {shlex.quote(str(tmp_path / "started"))}; sleep 3')
    process = start(sources, "build.load()")
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    cache = tmp_path / "cache"
    assert not list(cache.glob("*.so"))
    [remains] = cache.glob("building-*")
    fake_compiler(f'exec {REAL_COMPILER} "$@"')
    before = time.monotonic()
    assert answer(build.attempt(sources)) == 42
    assert time.monotonic() - before < build.WAIT_SECONDS / 2, "it waited for a process that is dead"
    assert remains.exists(), "it may be at work still, for all that is known"
    os.utime(remains, (0, 0))
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    assert answer(build.attempt(sources)) == 43
    assert not remains.exists()


def test_lock_that_is_never_released_only_delays_the_build(sources, monkeypatch):
    monkeypatch.setattr(build, "WAIT_SECONDS", 0.3)
    library = build.attempt(sources).library
    library.unlink()
    with library.with_suffix(".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status = build.attempt(sources)
    assert answer(status) == 42
    assert status.library == library


def test_file_system_without_locks_is_no_obstacle(sources, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert answer(build.attempt(sources)) == 42


def test_kernels_work_in_a_forked_child(sources):
    code = """
import ctypes, os
build.load()
if (child := os.fork()) == 0:
    build.load()
    os._exit(ctypes.CDLL(str(build.status().library)).answer())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert start(sources, code).wait(timeout=60) == 42


# The memo of a process


def test_failure_is_tried_once_told_every_time_and_warned_of_once(sources, fake_compiler):
    fake_compiler("exit 1")
    reasons = []
    for _ in range(3):
        with pytest.raises(build.Unavailable) as raised:
            build.load()
        reasons.append(str(raised.value))
    assert set(reasons) == {build.why_unavailable()}
    assert fake_compiler.runs() == 1
    with pytest.warns(RuntimeWarning) as heard:
        build.warn_once()
    assert str(heard[0].message) == f"coneheads: {reasons[0]}"
    build.warn_once()  # silent: warnings are errors here


def test_threads_share_one_build(sources, fake_compiler):
    fake_compiler(f'sleep 0.3; exec {REAL_COMPILER} "$@"')
    threads = [threading.Thread(target=build.load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.why_unavailable() is None
    assert fake_compiler.runs() == 1
    build.warn_once()  # silent: warnings are errors here


def test_import_builds_nothing_and_stays_light(sources, fake_compiler):
    fake_compiler("exit 1")
    code = "import coneheads; assert 'torch.utils.cpp_extension' not in sys.modules; assert build._memo.status is None"
    assert start(sources, code).wait(timeout=60) == 0
    assert fake_compiler.runs() == 0
    assert not (sources.parent / "cache").exists()


def test_terminal_is_told_of_the_build(sources):
    reader, terminal = pty.openpty()
    assert start(sources, "build.load(); build.load()", stderr=terminal).wait(timeout=60) == 0
    os.close(terminal)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    assert said.splitlines() == ["coneheads: compiling its CPU kernels for this machine, once (about 10 s)"]


def test_library_of_the_stable_abi_gives_operators(sources):
    """What the real kernels need: torch's headers are found, its symbols too, and an operator can be called."""
    import torch

    (sources / "attention.cpp").write_text("""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
torch::stable::Tensor twice(torch::stable::Tensor x) {
  auto result = torch::stable::empty_like(x);
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(result.data_ptr());
  torch::stable::parallel_for(0, x.numel(), 2, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) to[i] = 2 * from[i];
  });
  return result;
}
STABLE_TORCH_LIBRARY(coneheads_toy, library) { library.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(coneheads_toy, CPU, library) { library.impl("twice", TORCH_BOX(&twice)); }
""")
    build.load()
    assert torch.ops.coneheads_toy.twice(torch.arange(5.0)).tolist() == [0, 2, 4, 6, 8]
