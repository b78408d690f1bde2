"""Runs the command line as users do: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

TINY = [
    "bench",
    "--lengths",
    "16",
    "--heads",
    "1",
    "--size",
    "8",
    "--value_size",
    "8",
    "--seconds",
    "0",
    "--threads",
    "1",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coneheads", *arguments]


def coneheads(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Without the one warning of a machine that has no C++ compiler, so that all else on stderr shows."""
    environment = {"PYTHONWARNINGS": "ignore:coneheads:RuntimeWarning", **os.environ, **environment}
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, cwd=cwd, env=environment)
