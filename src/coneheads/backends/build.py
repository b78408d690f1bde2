"""Builds the C++ kernels on first use, keeps the library in a cache, and loads it.

So the package installs without a compiler, and the kernels use the instructions of the CPU they run on. Nothing here
may take a program down: whatever goes wrong ends in `Unavailable`, which says why, and another backend serves.
The switches are environment variables, read at the first use; docs/backends.md has them.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from coneheads.backends import compiler
from coneheads.backends.compiler import LEVELS, Compiler, Unavailable, unavailable

__all__ = ["LEVELS", "Status", "Unavailable", "load", "status", "warn_once", "why_unavailable"]

SOURCES = Path(__file__).parent / "csrc"
MAIN_SOURCE = "attention.cpp"  # it includes the others: the compiler is called once

WAIT_SECONDS = 120.0  # for the build of another process; after that this process builds too
LIBRARIES_KEPT = 8  # however old
LIBRARY_DAYS = 30
UNFINISHED_DAYS = 1


@dataclass(frozen=True)
class Status:
    """What came of the try to build and load the kernels."""

    available: bool
    reason: str | None  # why not
    level: str
    compiler: str | None = None  # as it presents itself
    library: Path | None = None
    built_seconds: float | None = None  # None: the library came from the cache
    switched_off: bool = False


@dataclass
class _Memo:
    """The outcome, once in a process: a second try would end as the first did."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    status: Status | None = None
    warned: bool = False


_memo = _Memo()


def status() -> Status:
    """Build the kernels if needed, load them, and tell what came of it."""
    if _memo.status is None:
        with _memo.lock:
            _memo.status = _memo.status or attempt(SOURCES)
    return _memo.status


def load() -> None:
    """Make the operators of the kernels callable, or raise Unavailable."""
    reason = why_unavailable()
    if reason is not None:
        raise Unavailable(reason)


def why_unavailable() -> str | None:
    """The reason why the kernels cannot be used; None if they can."""
    return status().reason


def warn_once() -> None:
    """Tell why a slower backend serves, once in a process; nothing if the kernels work or were switched off."""
    outcome = status()
    with _memo.lock:
        silent = outcome.available or outcome.switched_off or _memo.warned
        _memo.warned = True
    if not silent:
        warnings.warn(f"coneheads: {outcome.reason}", RuntimeWarning, stacklevel=2)


def attempt(sources: Path) -> Status:
    """One try to build and load the library of a directory of sources."""
    level = os.environ.get("CONEHEADS_CPU_LEVEL") or compiler.levels_of_this_cpu()[0]
    switch = os.environ.get("CONEHEADS_CPP") or "on"
    found = None
    try:
        if switch == "off":
            raise unavailable("CONEHEADS_CPP=off switches the C++ kernels off", "unset it to use them")
        if switch != "on":
            raise unavailable(f"CONEHEADS_CPP={switch} is neither on nor off", "set it to one of them or unset it")
        if sys.platform == "win32":
            raise unavailable("the C++ kernels are built on Linux and macOS only", "use Linux in WSL to have them")
        compiler.check_level(level)
        found = compiler.find_compiler()
        library, seconds = _obtain(_Recipe.of(sources, level, found))
    except Unavailable as error:
        return Status(False, str(error), level, found.name if found else None, switched_off=switch == "off")
    return Status(True, None, level, found.name if found else None, library, seconds)


@dataclass(frozen=True)
class _Recipe:
    """All that decides what the library will be; its name holds the hash of that."""

    main: Path
    level: str
    flags: tuple[str, ...]
    compiler: Compiler | None
    digest: str  # of all but the compiler

    @classmethod
    def of(cls, sources: Path, level: str, found: Compiler | None) -> _Recipe:
        flags = compiler.library_flags(level)
        setting = (torch.__version__, str(torch.version.git_version), sys.platform, platform.machine(), *flags)
        digest = hashlib.sha256("\0".join(setting).encode())
        main = sources / MAIN_SOURCE
        try:
            for path in sorted({main, *sources.glob("*.cpp"), *sources.glob("*.h")}):
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            what = f"{error.filename} cannot be read ({error.strerror})"
            raise unavailable(what, "install coneheads again") from error
        return cls(main, level, flags, found, digest.hexdigest())

    @property
    def library_name(self) -> str:
        """A pattern if there is no compiler: the library of any compiler will do then."""
        by = self.compiler.digest[:8] if self.compiler else "*"
        return f"attention-{self.level}-{self.digest[:16]}-{by}.so"


def _obtain(recipe: _Recipe) -> tuple[Path, float | None]:
    """The library, loaded, and how long its build took if it was built now."""
    problems = []
    for directory in _cache_directories():
        try:
            for library in sorted(directory.glob(recipe.library_name)):
                if _load_from_cache(library):
                    return library, None
            if recipe.compiler:
                return _build_once(recipe, recipe.compiler, directory / recipe.library_name)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror or error}")
    if recipe.compiler is None:
        what = f"no C++ compiler was found (CXX is not set; {', '.join(compiler.NAMES)} are not on PATH)"
        raise unavailable(what, "install g++ or clang++, or name a compiler in CXX")
    what = f"the C++ kernels can be written nowhere ({'; '.join(problems)})"
    raise unavailable(what, "set CONEHEADS_CACHE to a directory that can be written")


def _cache_directories() -> Iterator[Path]:
    """Where libraries are kept: the user's cache; where that cannot be written, the user's own directory in /tmp."""
    with suppress(RuntimeError):  # a user without a home
        if chosen := os.environ.get("CONEHEADS_CACHE"):
            yield Path(chosen).expanduser().absolute()
        elif os.path.isabs(cache := os.environ.get("XDG_CACHE_HOME", "")):
            yield Path(cache, "coneheads")
        else:
            yield Path.home() / ".cache" / "coneheads"
    with suppress(OSError):
        # Anyone can make a directory of this name, and what lies in it would be run: it must be this user's alone.
        own = Path(tempfile.gettempdir(), f"coneheads-{os.getuid()}")
        with suppress(FileExistsError):
            own.mkdir(mode=0o700)
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            own = Path(tempfile.mkdtemp(prefix="coneheads-"))
            atexit.register(shutil.rmtree, own, ignore_errors=True)
        yield own


def _load_from_cache(library: Path) -> bool:
    """Load a library if it is what was built: the system's loader crashes on one that is cut short."""
    try:
        if _checksum_file(library).read_bytes() != _checksum(library):
            return False
        _load(library)
    except (OSError, Unavailable):
        return False
    with suppress(OSError):
        os.utime(library)  # it is in use, and not to be removed as old
    return True


def _is_whole(library: Path) -> bool:
    """Whether a file is there and, if of the format ELF, reaches to the end of the table of sections, its last part."""
    if not library.exists():
        return False
    content = library.read_bytes()
    if not content.startswith(b"\x7fELF\x02") or len(content) < 64:
        return True  # the loader will tell
    (start,), (size, count) = struct.unpack_from("=Q", content, 40), struct.unpack_from("=HH", content, 58)
    return len(content) >= start + size * count


def _checksum(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        what = f"the library that the C++ compiler made cannot be loaded ({error.__cause__ or error})"
        remedy = f"set CONEHEADS_CACHE to a directory from which libraries may be loaded, or {compiler.ANOTHER}"
        raise unavailable(what, remedy) from error


def _build_once(recipe: _Recipe, by: Compiler, library: Path) -> tuple[Path, float | None]:
    """Build and load; of several processes that come here together, one builds."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock")):
        if _load_from_cache(library):
            return library, None
        start = time.monotonic()
        _build(recipe, by, library)
        seconds = time.monotonic() - start
        try:
            _load(library)
        except Unavailable:
            library.unlink(missing_ok=True)
            raise
        _remove_old(library.parent)
    return library, seconds


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes, if that can be had in reasonable time; if not, a second build does no harm."""
    import fcntl  # not on Windows, where this module can be imported all the same

    with path.open("w") as file:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
            except OSError:  # a file system without locks
                pass
            break
        yield


def _build(recipe: _Recipe, by: Compiler, library: Path) -> None:
    """Compile in a directory apart and move the library to its place in one step: half a library is never seen."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("coneheads: compiling its CPU kernels for this machine, once (about 10 s)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        output = scratch / library.name
        command = by.library_command(recipe.main, recipe.flags, output)
        code, said = compiler.run(command, scratch)
        if code and any(os.strerror(number) in said for number in (errno.ENOSPC, errno.EDQUOT)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if code or not _is_whole(output):
            log = library.with_suffix(".log")
            log.write_text(f"{shlex.join(command)}\n{said}\nexit status {code}\n")
            how = f"failed with exit status {code}" if code else "ended well but wrote no whole library"
            what = f"the C++ compiler {how}: {compiler.first_error(said)} (its whole output is in {log})"
            raise unavailable(what, compiler.ANOTHER)
        _checksum_file(output).write_bytes(_checksum(output))
        os.replace(output, library)
        os.replace(_checksum_file(output), _checksum_file(library))


def _remove_old(directory: Path) -> None:
    """Clear away what other versions left long ago, and what killed builds left."""

    def days(path: Path) -> float:
        return (time.time() - path.stat().st_mtime) / 86400

    with suppress(OSError):  # another process may be doing the same
        kept = {path.stem for path in sorted(directory.glob("attention-*.so"), key=days)[:LIBRARIES_KEPT]}
        for path in directory.glob("attention-*"):
            if path.stem not in kept and days(path) > LIBRARY_DAYS:
                path.unlink()
        for path in directory.glob("building-*"):
            if days(path) > UNFINISHED_DAYS:
                shutil.rmtree(path, ignore_errors=True)
