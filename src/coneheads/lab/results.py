"""What a run leaves and a comparison is made of: the folder of a run, its record, and many of them together."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "run.json"  # config, seed, versions, commit, hardware, wall time, metrics
METRICS = "metrics.jsonl"  # a line an evaluation: {"step": 100, "split": "valid", "loss": 0.3, "accuracy": 0.9}
TELEMETRY = "telemetry.json"  # what the model attends to: see telemetry.py
CONFIG = "config.yaml"  # the full config of the command


@dataclass(frozen=True)
class RunResult:
    """One finished run, as a comparison sees it."""

    score: str
    size: int
    seed: int
    value: float  # the headline metric on the test set; NaN if the run diverged
    metrics: dict[str, dict[str, float]]  # by split, by name
    parameters: int
    seconds_per_step: float
    curve: list[tuple[int, float]]  # step, headline metric on the validation set
    telemetry: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison, with what they have in common."""

    config: dict[str, Any]  # of the command `compare`
    task: str
    headline: str
    runs: list[RunResult]
    optimum: float | None  # of the headline metric on the test set, if it is known
    chance: float | None
    machine: dict[str, Any]
    command: str  # that makes this comparison again
    baseline: str = "dot"


def read_run(folder: Path) -> RunResult:
    """The result of a finished run, from its folder."""
    record = json.loads((folder / RECORD).read_text())
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    headline = record["headline"]
    return RunResult(
        score=record["config"]["model"]["score"],
        size=record["config"]["model"]["qk_dim"],
        seed=record["config"]["seed"],
        value=record["metrics"]["test"][headline] if record["status"] == "done" else math.nan,
        metrics=record["metrics"],
        parameters=record["parameters"],
        seconds_per_step=record["seconds_per_step"],
        curve=[(line["step"], line[headline]) for line in lines if line["split"] == "valid"],
        telemetry=json.loads((folder / TELEMETRY).read_text()) if record["status"] == "done" else {},
    )


def describe(metrics: dict[str, dict[str, float]], headline: str, optimum: float | None) -> str:
    """A line a split: its metrics; behind the test set's, what share that is of what can be achieved on it.

    >>> print(describe({"valid": {"accuracy": 0.5}, "test": {"accuracy": 0.45}}, "accuracy", 0.5))
    valid   accuracy 0.5000
    test    accuracy 0.4500, 90.0 % of what can be achieved (0.5000)
    """
    lines = []
    for split, numbers in metrics.items():
        text = "  ".join(f"{name} {value:.4f}" for name, value in sorted(numbers.items()))
        if split == "test" and optimum is not None and optimum != 1:
            text += f", {numbers[headline] / optimum:.1%} of what can be achieved ({optimum:.4f})".replace("%", " %")
        lines.append(f"{split:8}{text}")
    return "\n".join(lines)
