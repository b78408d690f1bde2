"""Checkpoints that survive a kill at any moment, and loading a trained run.

    RUN/checkpoints/index.json                    {"last": "step-00000800", "best": "step-00000600"}
    RUN/checkpoints/step-00000800/model.safetensors
    RUN/checkpoints/step-00000800/state.pt        optimizer, step, best so far; read with weights_only

A checkpoint is written to a temporary folder, which is then renamed; then the index is replaced; then folders that it
does not name are removed. Whatever is interrupted, the index names whole checkpoints.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml  # type: ignore[import-untyped]
from safetensors import SafetensorError
from torch import Tensor, nn

from coneheads.lab import tasks
from coneheads.lab.commands import TrainConfig
from coneheads.lab.config import Failed, WrongUse, from_dict
from coneheads.lab.results import CONFIG
from coneheads.lab.tasks.base import Task

FOLDER, INDEX, WEIGHTS, STATE = "checkpoints", "index.json", "model.safetensors", "state.pt"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: the last one, to go on from, and the best one, to use."""

    folder: Path

    @classmethod
    def of(cls, run: Path) -> Checkpoints:
        return cls(run / FOLDER)

    def named(self) -> dict[str, str]:
        """What the index names; empty before the first checkpoint."""
        try:
            found = json.loads((self.folder / INDEX).read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise Failed(
                f"{self.folder / INDEX} is damaged ({error}); it should name the checkpoints of the run"
            ) from None
        return dict(found)

    def save(self, step: int, weights: dict[str, Tensor], state: dict[str, Any], *, best: bool) -> None:
        """Makes this the last checkpoint, and the best one if it is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        named = self.named()
        name = f"step-{step:08d}"
        if name not in named.values():
            self._write(name, weights, state)
        named["last"] = name
        if best:
            named["best"] = name
        write_whole(self.folder / INDEX, json.dumps(named).encode())
        self._remove_all_but(set(named.values()))

    def _write(self, name: str, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        temporary = self.folder / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self.folder / name, ignore_errors=True)  # left by a kill before the index named it
        packed = io.BytesIO()  # torch's own writer would hide why a file cannot be written
        torch.save(state, packed)
        try:
            temporary.mkdir()
            contiguous = {key: value.contiguous() for key, value in weights.items()}
            _write_to_disk(temporary / WEIGHTS, safetensors.torch.save(contiguous))
            _write_to_disk(temporary / STATE, packed.getbuffer())
            _sync(temporary)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = "the last good one is kept, and --resume goes on from there" if self.named() else "there is none yet"
            raise Failed(f"could not write a checkpoint to {self.folder} ({error.strerror}); {kept}") from None
        temporary.rename(self.folder / name)

    def _remove_all_but(self, names: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def weights(self, which: str, device: str = "cpu") -> dict[str, Tensor]:
        """The weights of the "last" or "best" checkpoint."""
        path = self._path(which) / WEIGHTS
        try:
            return safetensors.torch.load_file(path, device=device)
        except (OSError, SafetensorError) as error:
            raise Failed(f"the checkpoint {path} is damaged or missing ({error})") from None

    def state(self, which: str) -> dict[str, Any]:
        """What was saved beside the weights."""
        path = self._path(which) / STATE
        try:
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, EOFError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as error:
            raise Failed(f"the checkpoint {path} is damaged or missing ({str(error).splitlines()[0]})") from None

    def _path(self, which: str) -> Path:
        named = self.named()
        if which not in named:
            raise Failed(f"{self.folder} has no {which!r} checkpoint; train first")
        return self.folder / named[which]


def load_weights(model: nn.Module, weights: dict[str, Tensor], origin: Path) -> None:
    """Gives the model the weights, or says which do not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise Failed(f"the checkpoint in {origin} is of another model: {reason}") from None


def load_run(run: Path | str, which: str = "best") -> tuple[TrainConfig, Task, nn.Module]:
    """Config, task and trained model of the run in a folder; which: "best" or "last"."""
    if not str(run):
        raise WrongUse("--run: name the folder of a run; `coneheads list` shows those there are")
    folder = Path(run)
    path = folder / CONFIG
    if not path.is_file():
        raise WrongUse(
            f"--run: {str(folder)!r} is no folder of a run (it has no {CONFIG}); `coneheads list` finds runs"
        )
    try:
        config = from_dict(TrainConfig, yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, WrongUse) as error:
        raise Failed(f"{path} is damaged: {error}") from None
    task = tasks.make(config.task, config.seed)
    model = task.model(config.model)
    load_weights(model, Checkpoints.of(folder).weights(which), folder)
    return config, task, model.eval()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it holds either what it held or all of the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _write_to_disk(temporary, content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise Failed(f"could not write {path} ({error.strerror}); it is as it was before") from None


def _write_to_disk(path: Path, content: bytes | memoryview) -> None:
    """Writes a file and waits until it is on the disk: a rename must not overtake what it names."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
