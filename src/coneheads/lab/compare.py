"""``coneheads compare``: scores x sizes x seeds, trained side by side; a table, plots and a report page."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
from pathlib import Path

from rich.console import Console

from coneheads._version import __version__
from coneheads.lab import machine, statistics
from coneheads.lab.checkpoint import write_whole
from coneheads.lab.commands import CompareConfig, TrainConfig
from coneheads.lab.config import Failed, as_dict, to_yaml
from coneheads.lab.models.start import resolve
from coneheads.lab.progress import Progress
from coneheads.lab.report import findings, screen_table, write_report
from coneheads.lab.results import CONFIG, RECORD, Comparison, read_run
from coneheads.lab.workers import Job, train_all


def run(config: CompareConfig) -> int:
    """Trains what is not trained yet, and shows what was found."""
    folder = Path(config.out) if config.out is not None else Path(f"outputs/compare-{config.task.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(
            f"--out: cannot write to {str(folder)!r} ({error.strerror}); name a folder that can be written"
        ) from None
    write_whole(folder / CONFIG, to_yaml(config).encode())
    jobs = plan(config, folder)
    train_missing(config, jobs)
    comparison = gather(config, jobs, folder)
    write_results(comparison, folder)
    report = write_report(comparison, folder)
    console = Console(highlight=False)
    console.print(screen_table(comparison))
    for sentence in findings(comparison):
        console.print(sentence, soft_wrap=True, markup=False)
    print(f"report: {report}")
    return 0


def plan(config: CompareConfig, folder: Path) -> list[Job]:
    """Every run of the comparison, in its folder. Seeds come last: the first results cover every score and size."""
    jobs = []
    for seed in config.seeds:
        for size in config.sizes:
            for score in config.scores:
                model = dataclasses.replace(config.model, score=score, qk_dim=size)
                one = TrainConfig(task=config.task, model=model, train=config.train, seed=seed, resume=True, threads=1)
                name = f"{score}-{size}-seed{seed}-{fingerprint(one)}"
                jobs.append(Job(one, folder / "runs" / name))
    return jobs


def fingerprint(config: TrainConfig) -> str:
    """Of all that a run's numbers depend on: a run is reused if this is the same."""
    start = dataclasses.asdict(resolve(config.model))  # the config may leave it to a name, whose meaning may change
    text = json.dumps({"coneheads": __version__, "start": start, **as_dict(config)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def is_finished(job: Job) -> bool:
    try:
        return bool(json.loads((job.folder / RECORD).read_text())["status"] in ("done", "diverged"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def train_missing(config: CompareConfig, jobs: list[Job]) -> None:
    missing = [job for job in jobs if not is_finished(job)]
    workers = config.jobs if config.jobs is not None else available_cores()
    with Progress(config.quiet, len(missing) * config.train.steps, f"{len(missing)} runs") as progress:
        if len(missing) < len(jobs):
            progress.say(f"{len(jobs) - len(missing)} of {len(jobs)} runs were finished before and are reused")
        train_all(missing, workers, progress)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gather(config: CompareConfig, jobs: list[Job], folder: Path) -> Comparison:
    """What the runs of a comparison left."""
    record = json.loads((jobs[0].folder / RECORD).read_text())
    headline = record["headline"]
    return Comparison(
        config=as_dict(config),
        task=config.task.name,
        headline=headline,
        runs=[read_run(job.folder) for job in jobs],
        optimum=record["optimum"].get(headline),
        chance=record["chance"],
        machine=dataclasses.asdict(machine.this_machine()),
        command=f"coneheads compare --config {folder / CONFIG}",
    )


def write_results(comparison: Comparison, folder: Path) -> None:
    """results.json with the statistics, results.csv with a line a run."""
    runs = [dataclasses.asdict(one) for one in comparison.runs]
    for one in runs:
        del one["telemetry"], one["curve"]
    whole = {
        "task": comparison.task,
        "headline": comparison.headline,
        "optimum": comparison.optimum,
        "chance": comparison.chance,
        "findings": findings(comparison),
        "rows": [dataclasses.asdict(row) for row in statistics.summarise(comparison)],
        "runs": runs,
        "machine": comparison.machine,
        "config": comparison.config,
    }
    write_whole(folder / "results.json", (json.dumps(without_nan(whole), indent=2) + "\n").encode())
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["score", "size", "seed", comparison.headline, "parameters", "seconds_per_step"])
    for run_ in comparison.runs:
        writer.writerow([run_.score, run_.size, run_.seed, run_.value, run_.parameters, run_.seconds_per_step])
    write_whole(folder / "results.csv", lines.getvalue().encode())


def without_nan(value: object) -> object:
    """null for a number that is none, which JSON does not know."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
