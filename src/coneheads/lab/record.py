"""What a run writes into its folder: config.yaml, metrics.jsonl, telemetry.json, run.json, TensorBoard's files."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import nn

from coneheads.lab import machine, telemetry
from coneheads.lab.checkpoint import write_whole
from coneheads.lab.commands import TrainConfig
from coneheads.lab.config import Failed, WrongUse, as_dict, to_yaml
from coneheads.lab.results import CONFIG, METRICS, RECORD, TELEMETRY
from coneheads.lab.tasks.base import Task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# flags that may differ when a run goes on: they do not change its numbers
FREE = ("out", "resume", "quiet", "threads")


@contextlib.contextmanager
def opened(folder: Path, config: TrainConfig, *, writes: bool) -> Iterator[Log]:
    """The log of the run in a folder. Only one process at a time may have it, and of those of a run one ``writes``."""
    if not writes:
        yield Log(folder, config, writes=False)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise Failed(
            f"--out: cannot write to {str(folder)!r} ({error.strerror}); name a folder that can be written"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Failed(
                f"--out: another process is training in {str(folder)!r}; wait for it or name another"
            ) from None
        _check_same_run(folder, config)
        log = Log(folder, config, writes=True)
        try:
            yield log
        finally:
            log.close()


def _check_same_run(folder: Path, config: TrainConfig) -> None:
    """The folder is new, or it holds this very run and ``--resume`` was said."""
    path = folder / CONFIG
    if not path.exists():
        write_whole(path, to_yaml(config).encode())
        return
    if not config.resume:
        raise WrongUse(f"--out: {str(folder)!r} holds a run already; --resume goes on with it, or name another folder")
    try:
        before = yaml.safe_load(path.read_text())
        changed = sorted(_differences(before, as_dict(config)))
    except (yaml.YAMLError, AttributeError, OSError) as error:
        raise Failed(f"{path} is damaged ({error}); --resume needs it to know the run") from None
    changed = [name for name in changed if name not in FREE]
    if changed:
        flags = ", ".join(f"--{name}" for name in changed)
        raise WrongUse(f"--resume: the run in {str(folder)!r} was started with other values of {flags}")


def _differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name in one.keys() | other.keys():
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            yield prefix + name


class Log:
    """The files of a run, all but its checkpoints."""

    def __init__(self, folder: Path, config: TrainConfig, *, writes: bool) -> None:
        self.folder, self.config, self.writes = folder, config, writes
        self.finished = self._finished()
        self.board: SummaryWriter | None = None
        if writes and self.finished is None:
            self._write_record({"status": "running"})

    def _finished(self) -> dict[str, Any] | None:
        """The record, if the run was brought to its end."""
        try:
            found = json.loads((self.folder / RECORD).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("status") == "done" else None

    def rewind(self, step: int) -> None:
        """Forgets what was logged after this step; it will be logged again."""
        if not self.writes:
            return
        path = self.folder / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) <= step]
        write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        if self.config.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def metrics(self, step: int, split: str, numbers: dict[str, float]) -> None:
        """One line of metrics.jsonl."""
        if not self.writes:
            return
        path = self.folder / METRICS
        try:
            with path.open("a") as file:
                file.write(json.dumps({"step": step, "split": split, **numbers}) + "\n")
        except OSError as error:
            raise Failed(
                f"could not write {path} ({error.strerror}); --resume goes on from the last checkpoint"
            ) from None
        if self.board:
            for name, value in numbers.items():
                self.board.add_scalar(f"{split}/{name}", value, step)

    def finish(self, found: dict[str, Any], model: nn.Module, task: Task) -> dict[str, Any]:
        """Writes what the model attends to, then the record: when that stands, the run is done."""
        if not self.writes:
            return found
        write_whole(self.folder / TELEMETRY, json.dumps(telemetry.observe(model, task)).encode())
        return self._write_record({"status": "done", **found})

    def diverged(self, found: dict[str, Any]) -> None:
        """The record of a run that has no result."""
        if self.writes:
            self._write_record({"status": "diverged", **found})

    def _write_record(self, found: dict[str, Any]) -> dict[str, Any]:
        here = dataclasses.asdict(machine.this_machine())
        whole = {
            "status": found["status"],
            "config": as_dict(self.config),
            "seed": self.config.seed,
            "versions": {name: here[name] for name in ("coneheads", "torch", "python")},
            "commit": here["commit"],
            "date": here["date"],
            "hardware": {name: here[name] for name in ("cpu", "level", "cores")} | {"threads": torch.get_num_threads()},
            **found,
        }
        write_whole(self.folder / RECORD, (json.dumps(whole, indent=2) + "\n").encode())
        return whole

    def close(self) -> None:
        if self.board:
            self.board.close()


def _step(line: str) -> float:
    """The step of a line; a line that was cut by a kill counts as later than any."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
