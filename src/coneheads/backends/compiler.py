"""The C++ compiler of this machine: which one it is, its flags for this CPU, and what it says when it fails."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

#: The instructions of each level, best first. Linux and the compilers (after -m) call them by the same names.
INSTRUCTIONS = {
    "avx512": ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
LEVELS = tuple(INSTRUCTIONS)

FLAGS = (
    *("-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC", "-fvisibility=hidden"),
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # the stable ABI as of torch 2.10
)

NAMES = ("c++", "g++", "clang++")
SECONDS = 300.0  # after that it is taken to hang; CONEHEADS_BUILD_TIMEOUT changes it
ANOTHER = "name a working compiler in CXX, or set CONEHEADS_CPP=off to hear no more of it"


class Unavailable(Exception):
    """The kernels cannot be used here; the message says why, what serves instead and what would help."""


def unavailable(what: str, remedy: str) -> Unavailable:
    """The error in its one form."""
    return Unavailable(f"{what}, so backend='auto' runs attention on the chunked backend, which is slower; {remedy}")


@dataclass(frozen=True)
class Compiler:
    """A command, and all that it says of itself."""

    command: tuple[str, ...]
    version: str

    @property
    def name(self) -> str:
        """As it presents itself."""
        return self.version.partition("\n")[0].strip() or shlex.join(self.command)

    @property
    def digest(self) -> str:
        """Differs if the compiler does."""
        return hashlib.sha256("\0".join((*self.command, self.version)).encode()).hexdigest()

    def library_command(self, source: Path, flags: tuple[str, ...], output: Path) -> list[str]:
        """The one call that makes a library of operators."""
        root = Path(torch.__file__).parent
        # torch is in the process already when the library is loaded: only macOS has to be told where it lies.
        where = [f"-Wl,-rpath,{root / 'lib'}", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        link = [f"-L{root / 'lib'}", "-ltorch_cpu", *where]
        return [*self.command, *flags, f"-I{root / 'include'}", str(source), "-o", str(output), *link]


def find_compiler() -> Compiler | None:
    """The compiler that CXX names, else the first on PATH; None if there is none."""
    command = words("CXX")
    if not command:
        command = [found for found in map(shutil.which, NAMES) if found][:1]
    elif shutil.which(command[0]) is None:
        raise unavailable(f"the compiler that CXX names, {command[0]}, is not there", ANOTHER)
    if not command:
        return None
    _, said = run([*command, "--version"])
    return Compiler(tuple(command), said)


def run(command: list[str], scratch: Path | None = None) -> tuple[int, str]:
    """Exit status and output of a compiler; if it hangs, it is ended with all the processes that it started."""
    limit = time_limit()
    # Its messages are read in English, and its temporary files go where they will be cleared away.
    environment = os.environ | {"LC_ALL": "C"} | ({"TMPDIR": str(scratch)} if scratch else {})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise unavailable(f"the C++ compiler {command[0]} cannot be run: {error.strerror}", ANOTHER) from error
    with process:
        try:
            said, _ = process.communicate(timeout=limit)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                remedy = f"allow it more seconds with CONEHEADS_BUILD_TIMEOUT, or {ANOTHER}"
                raise unavailable(f"the C++ compiler {command[0]} did not end within {limit:g} s", remedy) from error
            raise
    return process.returncode, said.decode(errors="replace")


def first_error(said: str) -> str:
    """The line of a compiler's output that tells most, shortened."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    summaries = ("ld returned", "linker command failed")
    errors = [line for line in lines if "error:" in line and not any(summary in line for summary in summaries)]
    line = next(iter(errors or lines), "it said nothing")
    return line if len(line) <= 240 else f"{line[:240]}..."


def library_flags(level: str) -> tuple[str, ...]:
    """All that decides what the compiler makes of the sources."""
    instructions = [f"-m{name}" for name in INSTRUCTIONS[level]]
    return (*FLAGS, f"-DCONEHEADS_LEVEL_{level.upper()}", *instructions, *words("CONEHEADS_CXXFLAGS"))


def levels_of_this_cpu() -> tuple[str, ...]:
    """The levels whose instructions this CPU has, best first.

    ATEN_CPU_CAPABILITY is for torch's own kernels and changes nothing here: CONEHEADS_CPU_LEVEL is the switch.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("portable",)
    with suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("flags"):
                return tuple(level for level in LEVELS if set(INSTRUCTIONS[level]) <= set(line.split()))
    best = {"AVX512": 0, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 2)
    return LEVELS[best:]


def check_level(level: str) -> None:
    """A level that the CPU lacks would end the process at the first instruction that is missing."""
    able = levels_of_this_cpu()
    if level not in able:
        unknown = f"CONEHEADS_CPU_LEVEL={level} is none of {', '.join(LEVELS)}"
        missing = f"CONEHEADS_CPU_LEVEL={level} asks for instructions that this CPU does not have"
        raise unavailable(missing if level in LEVELS else unknown, f"unset it or set it to {' or '.join(able)}")


def words(variable: str) -> list[str]:
    """An environment variable, split as a shell would."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        what = f"{variable} cannot be split into words ({error})"
        raise unavailable(what, f"correct the quotes in {variable}") from error


def time_limit() -> float:
    """How many seconds a compiler may take."""
    given = os.environ.get("CONEHEADS_BUILD_TIMEOUT") or SECONDS
    with suppress(ValueError):
        if (seconds := float(given)) > 0:
            return seconds
    raise unavailable(f"CONEHEADS_BUILD_TIMEOUT={given} is not a number of seconds", "correct it or unset it")
