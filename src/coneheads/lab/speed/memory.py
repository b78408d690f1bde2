"""Peak memory of one call, beside its inputs, each measured in a process of its own.

A server that has imported everything and computed nothing forks a child per measurement: as clean as a fresh
interpreter, without its seconds of imports. The child makes the inputs, warms up with a short call, resets the peak
that Linux keeps of its resident memory, and makes the call. So whatever the call keeps for itself, buffers of threads
included, counts. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from coneheads.lab.speed.candidates import OTHERS, call_of, candidates
from coneheads.lab.speed.runs import Run

# Long enough for the code of every step to be loaded, short enough to need no memory to speak of.
WARM_UP_LENGTH = 64


def supported() -> bool:
    return sys.platform == "linux" and Path("/proc/self/clear_refs").exists()


class MemoryServer:
    """Answers ``peak_mb(run)``; to be used in a ``with``. The module is one that serves when it is run."""

    def __init__(self, module: str = "coneheads.lab.speed.memory") -> None:
        self.module = module

    def __enter__(self) -> MemoryServer:
        # A session of its own: Ctrl-C in a terminal is for the command, which then ends this.
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            # Compiling in the process itself: helpers would outlive the measurement.
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._process:  # waits, and closes the pipes
            pass

    def peak_mb(self, run: Any) -> float | str:
        """Megabytes (of 2^20), or why they are not known."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(run)) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            return "the process that measures memory has ended"
        return float(answer) if isinstance(answer, (int, float)) else str(answer)


def serve(requests: IO[str], answers: IO[str], measure: Callable[[dict[str, Any]], float]) -> None:
    """A fork for every line, the fields of a run; the answer is what the child writes, or how it ended."""
    for line in requests:
        fields = json.loads(line)
        if fields["candidate"] in [other.name for other in OTHERS if other.compiles]:
            _import_compiler()  # once, here, instead of in every child
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            answer: object
            try:
                answer = measure(fields)
            except Exception as error:
                answer = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        status = os.waitpid(child, 0)[1]
        print(text or json.dumps(f"the measuring process ended with status {status}: out of memory?"), file=answers)
        answers.flush()


def _import_compiler() -> None:
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch.nn.attention.flex_attention"):
        importlib.import_module(name)


def measure(run: Run) -> float:
    """Megabytes that one call of the run adds to this process at its peak."""
    torch.set_num_threads(run.threads)
    candidate = candidates()[run.candidate]
    call = call_of(candidate, run)
    if candidate.compiles:
        call()  # another size would be another program
    else:
        short = dataclasses.replace(run, L=min(run.L, WARM_UP_LENGTH), S=min(run.S, WARM_UP_LENGTH))
        call_of(candidate, short)()
    return peak_of(call)


def peak_of(call: Callable[[], Any]) -> float:
    """Megabytes that a call, which was warmed up, adds to this process at its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_kb("VmRSS")
    kept = call()
    peak = _resident_kb("VmHWM")
    del kept
    return max(0, peak - before) / 1024


def _resident_kb(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout, lambda fields: measure(Run(**fields)))
