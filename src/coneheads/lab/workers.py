"""Runs side by side: processes that train one run after the other, each on one thread.

One thread a run is faster than several where models are small, and a run's numbers do not depend on how many cores
there are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from coneheads.lab.commands import TrainConfig
from coneheads.lab.config import Failed
from coneheads.lab.progress import Progress

TELL_EVERY = 0.2  # seconds between two messages about progress


class Job(NamedTuple):
    """A run to train in its folder."""

    config: TrainConfig
    folder: Path


class Worker(NamedTuple):
    process: BaseProcess
    line: Connection


def train_all(jobs: Sequence[Job], workers: int, progress: Progress) -> None:
    """Trains every job, and shows how many steps were made and how many runs are done.

    Raises Failed with the first failure; runs that are under way then stop, and go on from their last checkpoint when
    they are trained again. Ctrl-C does the same.
    """
    waiting, done = list(reversed(jobs)), 0
    busy: dict[Connection, tuple[Worker, Job]] = {}
    team = [_start() for _ in range(min(workers, len(jobs)))]
    try:
        for worker in team:
            _give(worker, waiting, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker, job = busy[ready]
                kind, content = _hear(worker, job)
                if kind == "steps":
                    progress.advance(content)
                elif kind == "skipped":
                    progress.skip(content)
                elif kind == "failed":
                    raise Failed(f"{job.folder}: {content}")
                else:
                    done += 1
                    progress.advance(0, runs=done)
                    _give(worker, waiting, busy)
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.process.join()
            worker.line.close()


def _start() -> Worker:
    context = multiprocessing.get_context("spawn")  # a fork of a process that has threads may hang
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _give(worker: Worker, waiting: list[Job], busy: dict[Connection, tuple[Worker, Job]]) -> None:
    busy.pop(worker.line, None)
    if waiting:
        job = waiting.pop()
        busy[worker.line] = worker, job
        worker.line.send(job)


def _hear(worker: Worker, job: Job) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = worker.line.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        code = worker.process.exitcode
        return "failed", f"the process that trained it ended with code {code} (out of memory?); call again to go on"
    return message


def _work(line: Connection) -> None:
    """The life of a worker: trains what it is given, and tells how it goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that asked decides
    import torch

    from coneheads.lab.train import Diverged, Trainer

    torch.set_num_threads(1)
    while True:
        job: Job = line.recv()
        told, steps = time.monotonic(), 0

        def on_step(_: dict[str, float]) -> None:
            nonlocal told, steps
            steps += 1
            if time.monotonic() - told > TELL_EVERY:
                line.send(("steps", steps))
                told, steps = time.monotonic(), 0

        try:
            with contextlib.suppress(Diverged):  # its record says so, and that is a result too
                Trainer(job.config, job.folder).fit(on_step, lambda skipped: line.send(("skipped", skipped)))
        except Exception as error:  # whatever it is, the one who asked has to hear it
            line.send(("failed", str(error) if isinstance(error, Failed) else repr(error)))
        else:
            line.send(("steps", steps))
            line.send(("done", None))
