"""On what a number was measured: processor, versions, commit. No host name and no path: the record is published."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from coneheads._version import __version__

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Machine:
    """The columns of a record that all its rows share."""

    date: str
    commit: str
    coneheads: str
    torch: str
    python: str
    cpu: str
    level: str
    cores: int


def this_machine() -> Machine:
    return Machine(
        date=datetime.date.today().isoformat(),
        commit=commit(),
        coneheads=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=cpu_model(),
        level=instruction_level(),
        cores=os.cpu_count() or 1,
    )


def cpu_model() -> str:
    """As Linux names it, or what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def instruction_level() -> str:
    """The vector instructions that torch's own kernels use here, such as AVX2 or AVX512."""
    return torch.backends.cpu.get_cpu_capability()


def memory_bytes() -> int | None:
    """The RAM of this machine, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def commit() -> str:
    """The commit of the checkout that the package is in, with -dirty if its files differ; "" outside of a checkout."""
    found = _git("rev-parse", "--short=12", "HEAD")
    tracked = _git("ls-files", "--", "__init__.py")
    if not found or not tracked:  # not a checkout, or a folder inside somebody else's
        return ""
    return f"{found}-dirty" if _git("status", "--porcelain", "--", ".") else found


def in_checkout(folder: Path) -> bool:
    """Whether the folder is the top of the checkout that this package runs from."""
    return (folder / "pyproject.toml").is_file() and folder / "src/coneheads" == PACKAGE


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
