"""Tables of what `coneheads bench` measured, from its records in benchmarks/results."""

import dataclasses
from collections.abc import Callable, Sequence

from coneheads.lab.speed import graphs, results, screen, targets
from coneheads.lab.speed.runs import YARDSTICK, Run
from tables import ROOT, markdown_table

MEASURED = ROOT / "benchmarks/results/targets.csv"
MEASURED_GRAPHS = ROOT / "benchmarks/results/graph.csv"


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
