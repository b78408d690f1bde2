"""Writes the tables that come from the code into README and docs, between their markers.

    python docs/generate.py            write them
    python docs/generate.py --check    change nothing; exit 1 if one is out of date

A table NAME stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

from coneheads.backends import BACKENDS
from coneheads.lab.speed import results, screen, targets
from coneheads.lab.speed.runs import YARDSTICK, Run
from coneheads.scores import BY_NAME, Score

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "benchmarks/results/targets.csv"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def scores_table() -> str:
    """Name, object with its defaults, and what it computes: the first line of its docstring."""

    def call(score: type[Score]) -> str:
        fields = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(score))
        return f"`{score.__name__}({fields})`"

    def summary(score: type[Score]) -> str:
        return (score.__doc__ or "").strip().splitlines()[0].replace("``", "`")

    rows = [[f"`{name}`", call(score), summary(score)] for name, score in BY_NAME.items()]
    return markdown_table(["name", "object and its defaults", "what it computes"], rows)


def backends_table() -> str:
    """What the declarations in coneheads.backends say."""
    rows = [
        [
            f"`{backend.name}`",
            backend.summary,
            backend.memory,
            "yes" if backend.second_derivative else "no",
            "yes" if backend.transforms else "no",
            ", ".join(backend.devices) or "every",
            ", ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes),
        ]
        for backend in BACKENDS
    ]
    return markdown_table(
        ["name", "how", "memory beside inputs", "second derivative", "`torch.func`", "devices", "dtypes"], rows
    )


def measured() -> list[results.Row]:
    """The rows that `coneheads bench --preset targets` wrote."""
    if not MEASURED.is_file():
        raise FileNotFoundError(f"there is no {MEASURED.name}: write it with coneheads bench --preset targets")
    return results.read(MEASURED)


def measured_where(rows: list[results.Row]) -> str:
    machine = rows[0].machine
    busy = max(row.result.other_load or 0 for row in rows)
    disturbed = f"; other programs kept up to {busy:.0%} of the processors busy" if busy > 0.1 else ""
    fewest = min(row.result.repetitions for row in rows if row.result.median_ms is not None)
    return (
        f"Medians of {fewest} repetitions or more, on {machine.cpu} ({machine.level}), {targets.THREADS} "
        f"threads, torch {machine.torch}, coneheads {machine.coneheads} at "
        f"{machine.commit or 'no commit'}, {machine.date}{disturbed}."
    )


def speed_table() -> str:
    """Times relative to SDPA for every size of the record, and its memory."""
    rows = measured()
    found = {row.run: row.result for row in rows}
    (ours,) = {run.candidate for run in found} - {YARDSTICK, "authors"}

    def both(run: Run, text: Callable[[float], str] = "{:.2f}".format, field: str = "ratio_to_sdpa") -> str:
        """Forward / forward + backward."""
        runs = [dataclasses.replace(run, pass_=pass_) for pass_ in targets.BOTH]
        values = [getattr(found[run], field) if run in found else None for run in runs]
        return " / ".join("-" if value is None else text(value) for value in values) if any(values) else ""

    def slowest(run: Run) -> str:
        texts = []
        for pass_ in targets.BOTH:
            others = [dataclasses.replace(run, score=score, pass_=pass_) for score in targets.OTHER_SCORES]
            texts.append([found[other].ratio_to_sdpa for other in others if other in found])
        return " / ".join(f"{max(ratios):.2f}" if ratios else "-" for ratios in texts) if any(texts) else ""

    sizes = [run for run in found if run.candidate == ours and run.score == "penumbral" and run.pass_ == "forward"]
    sizes = [run for run in sizes if run.threads == targets.THREADS and run.B * run.H * run.L > 128 and not run.causal]
    lines = [
        [
            f"{run.B}, {run.H}, {run.L}, {run.E}" + ("" if run.dtype == "float32" else f" {run.dtype}"),
            both(run.yardstick, screen.milliseconds, "median_ms"),
            *(both(dataclasses.replace(run, score=score)) for score in ("penumbral", "umbral", "dot")),
            slowest(run),
            both(dataclasses.replace(run, candidate="authors")),
        ]
        for run in sizes
        if (run.B, run.H) != (1, 1)
    ]
    header = ["B, H, L, E", "SDPA, ms", "penumbral", "umbral", "dot", "slowest other score", "the authors' penumbral"]
    return f"{markdown_table(header, lines)}\n\n{memory_sentence(found, ours)}\n{measured_where(rows)}"


def memory_sentence(found: dict[Run, results.Result], ours: str) -> str:
    of_memory = [target for target in targets.targets(ours) if target.quantity == "memory"]
    runs = dict.fromkeys(run for target in of_memory for run in (target.of, target.to))
    weighed = {run.candidate: found[run] for run in runs if run in found and found[run].peak_mb is not None}
    if set(weighed) != {ours, YARDSTICK, "authors"}:
        return "Memory was not measured."
    authors = weighed["authors"]
    return (
        f"Peak memory beside the inputs, forward and backward at B = H = 1, L = {targets.MEMORY_LENGTH}: "
        f"{weighed[ours].peak_mb:.0f} MB; SDPA {weighed[YARDSTICK].peak_mb:.0f} MB; the authors' formulation "
        f"{authors.peak_mb / 1024:.0f} GB ({authors.note})."
    )


def targets_table() -> str:
    """Every promise with what was measured."""
    rows = measured()
    found = [screen.verdict_cells(target, value) for target, value in targets.verdicts(rows)]
    held = sum(cells[-1] == "yes" for cells in found)
    table = markdown_table(["target", "promised", "measured", "holds"], found)
    return f"{held} of {len(found)} hold. {measured_where(rows)}\n\n{table}"


def with_table(text: str, name: str, table: str) -> str:
    """The text with the table of that name replaced."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no pair of markers {begin} ... {end}")
    return pattern.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


TABLES = {
    "README.md": {"scores": scores_table, "backends": backends_table, "speed": speed_table},
    "benchmarks/README.md": {"targets": targets_table},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = []
    for file, tables in TABLES.items():
        old = new = (ROOT / file).read_text()
        for name, table in tables.items():
            try:
                new = with_table(new, name, table())
            except FileNotFoundError as missing:
                print(missing, file=sys.stderr)
                return 1
        if new != old:
            stale.append(file)
            if not check:
                (ROOT / file).write_text(new)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs` or `python docs/generate.py`", file=sys.stderr)
        return 1
    print("tables are up to date" if not stale else f"wrote {', '.join(stale)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
