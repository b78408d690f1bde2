"""Writes the tables that come from the code into README and docs, between their markers.

    python docs/generate.py            write them
    python docs/generate.py --check    change nothing; exit 1 if one is out of date

A table NAME stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coneheads.backends import BACKENDS
from coneheads.lab.models.start import PAPER, TUNED, Start
from coneheads.lab.speed import graphs, results, screen, targets
from coneheads.lab.speed.runs import YARDSTICK, Run
from coneheads.lab.tasks import TASKS
from coneheads.nn.start import TEMPERATURE
from coneheads.scores import BY_NAME, Score

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for what the tests know
MEASURED = ROOT / "benchmarks/results/targets.csv"
MEASURED_GRAPHS = ROOT / "benchmarks/results/graph.csv"
RESULTS = ROOT / "docs/results"
LIBRARIES = {
    "torch_nn": "torch",
    "transformers": "transformers",
    "timm": "timm",
    "diffusers": "diffusers",
    "pyg": "torch-geometric",
}
LAB_SCORES = ("dot", "laplacian", "penumbral", "umbral")


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
            "yes" if backend.onnx else "no",
            ", ".join(backend.devices) or "every",
            ", ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes),
        ]
        for backend in BACKENDS
    ]
    return markdown_table(
        ["name", "how", "memory beside inputs", "second derivative", "`torch.func`", "ONNX", "devices", "dtypes"], rows
    )


def measured() -> list[results.Row]:
    """The rows that `coneheads bench --preset targets` wrote."""
    if not MEASURED.is_file():
        raise FileNotFoundError(f"there is no {MEASURED.name}: write it with coneheads bench --preset targets")
    return results.read(MEASURED)


def measured_where(rows: Sequence[results.Row | graphs.GraphRow]) -> str:
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


def graphs_table() -> str:
    """Every promise about graphs with what was measured, and all layers and epochs."""
    if not MEASURED_GRAPHS.is_file():
        raise FileNotFoundError(f"there is no {MEASURED_GRAPHS.name}: write it with coneheads bench --graph")
    rows = results.read(MEASURED_GRAPHS, graphs.GraphRow)
    found = [screen.verdict_cells(target, value) for target, value in graphs.verdicts(rows)]
    held = sum(cells[-1] == "yes" for cells in found)
    promises = markdown_table(["target", "promised", "measured", "holds"], found)

    def number(value: float | None, text: Callable[[float], str]) -> str:
        return "-" if value is None else text(value)

    lines = []
    forward = {row.run: row.result for row in rows if row.run.pass_ == "forward"}
    for run, result in ((row.run, row.result) for row in rows if row.run.pass_ != "forward"):
        alone = forward.get(dataclasses.replace(run, pass_="forward"), graphs.GraphResult())
        lines.append(
            [
                f"{run.graph}{', epoch' if run.pass_ == graphs.EPOCH else ''}",
                f"`{run.candidate}`",
                run.layer,
                number(alone.median_ms, screen.milliseconds) if run.pass_ != graphs.EPOCH else "",
                number(result.median_ms, screen.milliseconds),
                number(result.ratio_to_pyg, "{:.2f}".format),
                number(result.peak_mb, "{:.0f}".format),
            ]
        )
    header = ["graph", "candidate", "layer", "forward, ms", "forward + backward or epoch, ms", "of PyG", "peak MB"]
    return f"{held} of {len(found)} hold. {measured_where(rows)}\n\n{promises}\n\n{markdown_table(header, lines)}"


def study(name: str) -> dict[str, Any]:
    """What docs/studies.py found."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name}: write it with python docs/studies.py {name}")
    return json.loads(path.read_text())


def where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"On {machine['cpu']}, torch {machine['torch']}, coneheads {machine['coneheads']} at "
        f"{machine['commit'] or 'no commit'}, {machine['date']}."
    )


def mean_and_spread(row: dict[str, Any]) -> str:
    """As 0.981 ± 0.003, with a note of runs that ended in no number."""
    text = "-" if row["mean"] is None else f"{row['mean']:.3f}"
    if row["std"] is not None:
        text += f" ± {row['std']:.3f}"
    return text + (f" ({row['diverged']} diverged)" if row["diverged"] else "")


def by_size(line: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """The rows of a comparison by size and score."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in line["rows"]:
        found.setdefault(row["size"], {})[row["score"]] = row
    return found


def better_cone(rows: dict[str, dict[str, Any]]) -> str:
    """The cone with the higher mean, its difference to dot product, the wider interval, and the verdict on it."""
    cones = [rows[score] for score in ("penumbral", "umbral") if rows[score]["mean"] is not None]
    best = max(cones, key=lambda row: row["mean"])
    difference = best["difference"]
    interval = difference["student"]
    low, high = interval["low"], interval["high"]
    return f"{best['score']} {difference['mean']:+.3f} [{low:+.3f}, {high:+.3f}], {best['verdict']}"


def scores_by_size(name: str, first: str, *, share: bool = False) -> str:
    """A line for every comparison of a study and size: the scores, and the better cone against dot product.

    share: also the best that can be achieved, where it is known and is not 1.
    """
    found = study(name)
    lines = []
    for line in found["lines"]:
        for size, rows in by_size(line).items():
            cells = [line["label"], str(size), *(mean_and_spread(rows[score]) for score in LAB_SCORES)]
            lines.append(cells + ([f"{line['optimum']:.3f}"] if share else []) + [better_cone(rows)])
    header = [first, "size", *LAB_SCORES, *(["optimum"] if share else []), "better cone - dot, 95 % (Student)"]
    seeds = max(row["n"] + row["diverged"] for line in found["lines"] for row in line["rows"])
    headline = found["lines"][0]["headline"]
    return f"{markdown_table(header, lines)}\n\n{headline.capitalize()} on the test set, {seeds} seeds. {where(found)}"


def compare_table() -> str:
    """README's: the comparison that `coneheads compare` makes without arguments."""
    found = study("demo")
    lines = [
        [str(size), *(mean_and_spread(rows[score]) for score in LAB_SCORES), better_cone(rows)]
        for size, rows in by_size(found["lines"][0]).items()
    ]
    seeds = found["lines"][0]["rows"][0]["n"]
    table = markdown_table(["size of query and key", *LAB_SCORES, "better cone - dot, 95 % (Student)"], lines)
    return f"{table}\n\nAccuracy, mean ± standard deviation over {seeds} seeds. {where(found)}"


def changes_table() -> str:
    """One change at a time: a line for each, a column for each taxonomy and cone."""
    found = study("changes")
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for line in found["lines"]:
        taxonomy, _, change = line["label"].partition(": ")
        for row in line["rows"]:
            cells.setdefault(change, {})[taxonomy, row["score"]] = mean_and_spread(row)
    columns = list(cells[""])
    rows = [
        [f"`{change}`" if change else "none: as tuned", *(values[column] for column in columns)]
        for change, values in cells.items()
    ]
    header = ["change", *(f"{score}, {taxonomy}" for taxonomy, score in columns)]
    return f"{markdown_table(header, rows)}\n\nSize 3, accuracy on the test set, 2 seeds. {where(found)}"


def published_table(name: str) -> str:
    """A line a score: ours, and what the paper has."""
    found = study(name)
    (line,) = found["lines"]
    published = TASKS[name].published
    rows = [
        [
            row["score"],
            mean_and_spread(row),
            f"{published[row['score']]:g}",
            str(row["n"] + row["diverged"]),
            _interval(row["difference"]),
            row["verdict"] or "baseline",
        ]
        for row in line["rows"]
    ]
    header = ["score", f"{line['headline']}, mean ± std", "paper", "seeds", "to dot, 95 % (Student)", "verdict"]
    return f"{markdown_table(header, rows)}\n\n`{line['command']}`\n\n{where(found)}"


def _interval(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return ""
    interval = difference["student"]
    return f"{difference['mean']:+.4f} [{interval['low']:+.4f}, {interval['high']:+.4f}]"


def commands_list() -> str:
    """The commands behind the tables, one a line of theirs."""
    lines = [line["command"] for name in ("taxonomies", "starts", "tree", "changes") for line in study(name)["lines"]]
    return "\n".join(["```", *lines, "```"])


def starts_values_table() -> str:
    """What the two starts are, score by score."""
    fields = [field.name for field in dataclasses.fields(Start)]
    rows = [["`paper`, every score", *(_plain(getattr(PAPER, field)) for field in fields)]]
    rows += [
        [f"`tuned`, {score}", *(_plain(getattr(start, field)) for field in fields)] for score, start in TUNED.items()
    ]
    return markdown_table(["start", *(f"`{field}`" for field in fields)], rows)


def _plain(value: object) -> str:
    return (
        {True: "yes", False: "no"}[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def supported_table() -> str:
    """The models that the tests convert, and those that they see refused, by library and the version installed."""
    pins = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = []
    for library, package in LIBRARIES.items():
        models = importlib.import_module(f"tests.integrations.{library}_models")
        names = [", ".join(f"`{name}`" for name in getattr(models, found, {})) for found in ("MODELS", "REFUSED")]
        rows.append([f"{package} {pins[package]}", *names])
    return markdown_table(["library", "converted", "refused, with the reason"], rows)


def entropy_table() -> str:
    """The share of keys that a query attends to in a new layer."""
    entropy = importlib.import_module("tests.nn.entropy")

    def start(score: str) -> str:
        if score not in TEMPERATURE:
            return "1 / sqrt(E)"
        factor, power = TEMPERATURE[score]
        return f"{factor:g}" + ({0.5: " sqrt(E)", -0.5: " / sqrt(E)", 0.0: ""}[power])

    rows = [
        [f"`{row.score}`", start(row.score)]
        + [f"{row.started[size]:.2f}" for size in entropy.SIZES]
        + [" / ".join(f"{row.plain[size]:.2f}" for size in entropy.SIZES)]
        for row in entropy.rows()
    ]
    sizes = [f"E = {size}" for size in entropy.SIZES]
    return markdown_table(["score", "gamma at the start", *sizes, "with gamma = 1"], rows)


def with_table(text: str, name: str, table: str) -> str:
    """The text with the table of that name replaced."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no pair of markers {begin} ... {end}")
    return pattern.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


TABLES = {
    "README.md": {
        "compare": compare_table,
        "scores": scores_table,
        "backends": backends_table,
        "speed": speed_table,
    },
    "docs/tuning.md": {
        "starts": starts_values_table,
        "taxonomies": lambda: scores_by_size("taxonomies", "taxonomy"),
        "paper": lambda: scores_by_size("starts", "taxonomy and start"),
        "changes": changes_table,
        "tree": lambda: scores_by_size("tree", "objective and start", share=True),
        "commands": commands_list,
    },
    "docs/integrations.md": {"supported": supported_table, "entropy": entropy_table},
    "docs/experiments.md": {"cora": lambda: published_table("cora")},
    "benchmarks/README.md": {"targets": targets_table, "graphs": graphs_table},
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
