"""Time and memory against the length, for every candidate: one row of pictures for each score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coneheads.lab.speed.results import Row
from coneheads.lab.speed.runs import YARDSTICK, Result

COLOURS = {
    YARDSTICK: "black",
    "authors": "#c44e52",
    "plain": "#dd8452",
    "compiled": "#ccb04c",
    "flex": "#8172b3",
    "reference": "#937860",
    "chunked": "#5b7fb4",
    "cpp": "#2f8f5b",
}


def draw(rows: list[Row], path: Path) -> None:
    """Log-log, with a band from the 20th to the 80th percentile."""
    scores = list(dict.fromkeys(row.run.score for row in rows if row.run.candidate != YARDSTICK))
    passes = list(dict.fromkeys(row.run.pass_ for row in rows))
    weighed = any(row.result.peak_mb is not None for row in rows)
    columns = len(passes) + (1 if weighed else 0)
    figure = Figure(figsize=(4.6 * columns, 3.9 * len(scores)), layout="constrained")
    panels = figure.subplots(len(scores), columns, squeeze=False)
    for score, panels_of_score in zip(scores, panels, strict=True):
        own = [row for row in rows if row.run.score == score or row.run.candidate == YARDSTICK]
        for pass_, axes in zip(passes, panels_of_score, strict=False):
            of_pass = [row for row in own if row.run.pass_ == pass_]
            _lines(axes, of_pass, lambda result: result.median_ms, band=True)
            axes.set(title=f"{score}, {pass_.replace('_', ' + ')}", ylabel="milliseconds")
        if weighed:
            axes = panels_of_score[-1]
            last = [row for row in own if row.run.pass_ == passes[-1]]
            _lines(axes, last, lambda result: result.peak_mb)
            axes.set(title=f"{score}, peak memory of {passes[-1].replace('_', ' + ')}", ylabel="MB beside the inputs")
    handles = {str(line.get_label()): line for axes in panels.flat for line in axes.get_lines()}
    ordered = [name for name in COLOURS if name in handles] + [name for name in handles if name not in COLOURS]
    figure.legend([handles[name] for name in ordered], ordered, loc="outside right center", frameon=False)
    first = rows[0]
    figure.suptitle(
        f"B={first.run.B} H={first.run.H} Ev={first.run.Ev} {first.run.dtype}, {first.run.threads} threads of "
        f"{first.machine.cpu} ({first.machine.level}), torch {first.machine.torch}",
        fontsize=9,
        color="0.35",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, rows: list[Row], value: Callable[[Result], float | None], band: bool = False) -> None:
    lengths = sorted({row.run.L for row in rows})
    for name in dict.fromkeys(row.run.candidate for row in rows):
        found = sorted(
            (row.run.L, y, row.result)
            for row in rows
            if row.run.candidate == name and (y := value(row.result)) is not None
        )
        if not found:
            continue
        places, heights = [place for place, _, _ in found], [height for _, height, _ in found]
        colour, style = COLOURS.get(name, "0.5"), "--" if name == YARDSTICK else "-"
        axes.plot(places, heights, style, color=colour, marker="o", markersize=4, label=name)
        if band:
            low, high = ([p or 0.0 for p in ps] for ps in zip(*((r.p20_ms, r.p80_ms) for *_, r in found), strict=True))
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("L = S")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
