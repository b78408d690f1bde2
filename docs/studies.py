"""Runs the comparisons that README and docs quote: `python docs/studies.py [NAME ...] [--mammals FILE] [--cora DIR]`.

A study is a list of `coneheads compare` commands. Their runs go to outputs/studies, and are reused when it is called
again; what the tables need goes to docs/results/NAME.json, from which docs/generate.py makes the tables. All take
about an hour on two cores, and Cora's hundred seeds two and a half more. Without --mammals, those on the WordNet
mammals are left out and their old results kept; without --cora, that on Cora.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coneheads.lab import cli, compare, statistics
from coneheads.lab.commands import CompareConfig
from coneheads.lab.progress import Progress
from coneheads.lab.report import findings, write_report
from coneheads.lab.results import Comparison
from coneheads.lab.workers import train_all

ROOT = Path(__file__).resolve().parent.parent
RUNS, RESULTS = ROOT / "outputs/studies", ROOT / "docs/results"
# Files of the user's, by what stands for them in a command.
MAMMALS, CORA = "mammal_closure.tsv", "data"


class Command(NamedTuple):
    """A line of a table: what it is called, and the flags of `coneheads compare`."""

    label: str
    flags: str


CONES, ALL = "--scores penumbral,umbral", "--scores dot,laplacian,penumbral,umbral"
TAXONOMIES = {
    "4^5": "--task.branching 4 --task.depth 5",
    "3^6": "--task.branching 3 --task.depth 6",
    "2^9": "--task.branching 2 --task.depth 9",
    "2^11": "--task.branching 2 --task.depth 11",
    "WordNet mammals": f"--task.taxonomy {MAMMALS}",
}
# Each alone, everything else as tuned.
CHANGES = (
    "", "--model.start paper", "--no_model.learn_gamma", "--model.gamma 0.5", "--model.gamma 2", "--model.gamma 20",
    "--model.learn_radius", "--model.radius 0.1", "--model.radius 1", "--model.height_scale 0.1",
    "--model.height_scale 1", "--model.height_start 1", "--model.height_start -1", "--model.height_spread 0",
    "--model.readout height_sq", "--model.readout distance", "--model.qk_norm", "--model.qk_scale 3",
    "--model.embedding_scale 0.03", "--model.embedding_scale 1", "--train.lr 0.003", "--train.lr 0.02",
)  # fmt: skip


def studies() -> dict[str, list[Command]]:
    sizes, five, three = "--sizes 3,4,8", "--seeds 0,1,2,3,4", "--seeds 0,1,2"
    tree = f"--task tree {ALL} --sizes 4 {three} --train.steps 500"
    return {
        "cora": [Command("Cora", f"--config configs/paper/cora.yaml --task.root {CORA}")],
        "demo": [Command("demo", "")],
        "taxonomies": [Command(name, f"{flags} {ALL} {sizes} {five}") for name, flags in TAXONOMIES.items()],
        "tree": [
            Command(f"{objective}, {start}", f"{tree} --task.objective {objective} --model.start {start}")
            for objective in ("root", "leaf")
            for start in ("paper", "tuned")
        ],
        "starts": [
            Command(f"{name}, {start}", f"{TAXONOMIES[name]} {ALL} --sizes 3,8 {three} --model.start {start}")
            for name in ("4^5", "2^11")
            for start in ("paper", "tuned")
        ],
        "changes": [
            Command(f"{name}: {change}", f"{TAXONOMIES[name]} {CONES} --sizes 3 --seeds 0,1 {change}")
            for change in CHANGES
            for name in ("4^5", "WordNet mammals")
        ],
    }


def configs(commands: list[Command], files: dict[str, str | None]) -> Iterator[tuple[Command, CompareConfig]]:
    for command in commands:
        flags = shlex.split(command.flags)
        if any(files[flag] is None for flag in flags if flag in files):
            continue
        flags = [files.get(flag) or flag for flag in flags]
        config = cli.parse("compare", flags)
        assert isinstance(config, CompareConfig)
        yield command, config


def run(name: str, commands: list[Command], files: dict[str, str | None]) -> None:
    """Trains what is missing of a study, and writes its results."""
    found = list(configs(commands, files))
    if not found:
        return
    jobs = {command: compare.plan(config, RUNS) for command, config in found}
    missing = {job.folder: job for plan in jobs.values() for job in plan if not compare.is_finished(job)}
    steps = sum(job.config.train.steps for job in missing.values())
    with Progress(False, steps, f"{name}, {len(missing)} runs") as progress:
        train_all(list(missing.values()), compare.available_cores(), progress)
    path = RESULTS / f"{name}.json"
    lines = {line["label"]: line for line in json.loads(path.read_text())["lines"]} if path.exists() else {}
    for command, config in found:
        comparison = compare.gather(config, jobs[command], RUNS)
        lines[command.label] = line_of(command, comparison)
        if name == "demo":
            write_report(comparison, RUNS / "demo")
            shutil.copy(RUNS / "demo/figures/sizes.png", ROOT / "docs/figures/compare.png")
    machine = {key: value for key, value in comparison.machine.items() if key != "cores"}
    ordered = [lines[command.label] for command in commands if command.label in lines]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(compare.without_nan({"machine": machine, "lines": ordered}), indent=1) + "\n")


def line_of(command: Command, comparison: Comparison) -> dict[str, object]:
    return {
        "label": command.label,
        "command": " ".join(f"coneheads compare {command.flags}".split()),
        "headline": comparison.headline,
        "optimum": comparison.optimum,
        "chance": comparison.chance,
        "findings": findings(comparison),
        "rows": [dataclasses.asdict(row) for row in statistics.summarise(comparison)],
    }


def main() -> None:
    known = studies()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all if none is named")
    parser.add_argument("--mammals", help="the file mammal_closure.tsv of the WordNet mammals")
    parser.add_argument("--cora", help="the folder that has Cora/raw/ind.cora.x and so on, or raw/")
    arguments = parser.parse_args()
    files = {MAMMALS: arguments.mammals, CORA: arguments.cora}
    if unknown := set(arguments.names) - set(known):
        parser.error(f"there is no study {', '.join(unknown)}; there are {', '.join(known)}")
    for name in arguments.names or known:
        run(name, known[name], files)


if __name__ == "__main__":
    main()
