"""Cone telemetry: how sharp each head is, and what its cones make of the tokens, as a table and as small plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from coneheads.lab.report.figures import Panel, Picture, colour, marker
from coneheads.lab.report.maps import shown_runs
from coneheads.lab.report.tables import NONE
from coneheads.lab.results import Comparison, RunResult
from coneheads.lab.statistics import scores_of

HEADER = ["size", "score", "layer", "entropy", "of equal weights", "common ancestor", "ancestor relation",
          "level of queries", "level of keys", "parameters of the score"]  # fmt: skip
SHARES = {
    "relative_entropy": "entropy, of equal weights",
    "common_ancestor": "pairs with a common ancestor",
    "related": "pairs in ancestor relation",
}
# fields of scores that the lab does not learn
FIXED = ("height_scale", "offset")
# of the quantiles 0, 5, 25, 50, 75, 95, 100 %
LOW, BOX_LOW, MEDIAN, BOX_HIGH, HIGH = 1, 2, 3, 4, 5


def table(comparison: Comparison) -> list[list[str]]:
    """A row for each size, score and layer: means over heads and seeds, levels as 5 / 50 / 95 %."""
    found = []
    for size in sorted({run.size for run in comparison.runs}):
        for score in scores_of(comparison):
            runs = [run for run in comparison.runs if (run.size, run.score) == (size, score) and run.telemetry]
            for layer in range(min((len(run.telemetry["layers"]) for run in runs), default=0)):
                heads = [head for run in runs for head in run.telemetry["layers"][layer]["heads"]]
                found.append([str(size), score, str(layer + 1), *_cells(heads)])
    return found


def _cells(heads: list[dict[str, Any]]) -> list[str]:
    numbers = [
        _mean_of(heads, "entropy", "{:.2f}"),
        _mean_of(heads, "relative_entropy", "{:.0%}"),
        _mean_of(heads, "common_ancestor", "{:.0%}"),
        _mean_of(heads, "related", "{:.0%}"),
    ]
    names = [name for name in heads[0]["parameters"] if name not in FIXED]
    values = {name: [head["parameters"][name] for head in heads] for name in names}
    learned = "; ".join(f"{name} {_range(found)}" for name, found in values.items())
    return [*numbers, _levels(heads, "query_levels"), _levels(heads, "key_levels"), learned or NONE]


def _mean_of(heads: list[dict[str, Any]], name: str, shape: str) -> str:
    values = [head[name] for head in heads if head[name] is not None]
    return shape.format(float(np.mean(values))).replace("%", " %") if values else NONE


def _levels(heads: list[dict[str, Any]], name: str) -> str:
    quantiles = [head[name] for head in heads if head[name] is not None]
    if not quantiles:
        return NONE
    means = np.mean(quantiles, axis=0)
    return " / ".join(f"{means[place]:.2g}" for place in (LOW, MEDIAN, HIGH))


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def plots(comparison: Comparison) -> Picture | None:
    """Per head and layer, at the size that the attention maps show: shares of every seed, levels of the first."""
    shown = shown_runs(comparison)
    if not shown or not shown[0].telemetry["layers"]:
        return None
    runs = [run for run in comparison.runs if run.size == shown[0].size and run.telemetry]
    panels = []
    for name, title in SHARES.items():
        if any(value is not None for run in runs for value in _of_heads(run, name)):
            panels.append(Panel(title, _shares_drawer(comparison, runs, name)))
    for run in shown:
        if any(levels is not None for levels in _of_heads(run, "key_levels")):
            panels.append(Panel(f"levels, {run.score}", level_drawer(run.telemetry, run.score)))
    return Picture("cones", panels, tuple(run.score for run in shown))


def _of_heads(run: RunResult, name: str) -> list[Any]:
    return [head[name] for layer in run.telemetry["layers"] for head in layer["heads"]]


def _shares_drawer(comparison: Comparison, runs: list[RunResult], name: str) -> Callable[[Axes], None]:
    scores = [score for score in scores_of(comparison) if any(run.score == score for run in runs)]

    def draw(axes: Axes) -> None:
        for number, score in enumerate(scores):
            shift = (number - (len(scores) - 1) / 2) * 0.14
            values = [_of_heads(run, name) for run in runs if run.score == score]
            for place, of_head in enumerate(zip(*values, strict=False)):
                present = [value for value in of_head if value is not None]
                if present:
                    axes.plot(
                        [place + shift] * len(present), present, ".", color=colour(score), alpha=0.45, markersize=4
                    )
                    axes.plot(place + shift, float(np.mean(present)), marker(score), color=colour(score), markersize=6)
        _name_heads(axes, runs[0].telemetry)
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid(axis="y", alpha=0.2)

    return draw


def level_drawer(telemetry: dict[str, Any], score: str) -> Callable[[Axes], None]:
    """Levels of queries (filled) and keys (hollow) for each head: 5 to 95 %, the middle half, the median."""

    def draw(axes: Axes) -> None:
        heads = [head for layer in telemetry["layers"] for head in layer["heads"]]
        for place, head in enumerate(heads):
            for shift, name, filled in ((-0.15, "query_levels", True), (0.15, "key_levels", False)):
                levels = head[name]
                if levels is None:
                    continue
                x = place + shift
                axes.plot([x, x], [levels[LOW], levels[HIGH]], color=colour(score), linewidth=1.2)
                axes.bar(
                    x, levels[BOX_HIGH] - levels[BOX_LOW], 0.22, levels[BOX_LOW], edgecolor=colour(score),
                    facecolor=colour(score) if filled else "none", alpha=0.75 if filled else 1, linewidth=1.2,
                )  # fmt: skip
                axes.plot(
                    [x - 0.11, x + 0.11], [levels[MEDIAN]] * 2, color=matplotlib.rcParams["text.color"], linewidth=1.6
                )
        _name_heads(axes, telemetry)
        axes.set_ylabel("level (root above)")
        axes.grid(axis="y", alpha=0.2)

    return draw


def _name_heads(axes: Axes, telemetry: dict[str, Any]) -> None:
    layers = telemetry["layers"]
    names = [
        f"{number}.{head}" if len(layers) > 1 else str(head)
        for number, layer in enumerate(layers, 1)
        for head in range(1, len(layer["heads"]) + 1)
    ]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xlabel("layer.head" if len(layers) > 1 else "head")
