"""The plots of a comparison: the headline metric against size, its difference to the baseline, and learning curves."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from matplotlib.axes import Axes

from coneheads.lab.report.figures import Panel, Picture, colour, marker
from coneheads.lab.results import Comparison, RunResult
from coneheads.lab.statistics import Row, scores_of, summarise

# How far apart the scores stand at one size.
DODGE = 0.11


def size_sweep(comparison: Comparison) -> Picture:
    """The headline metric and the difference to the baseline, at every size."""
    found = summarise(comparison)
    if not found:
        return Picture("sizes", [])
    compared = [row for row in found if row.difference is not None]
    height = max(3.2, 1.1 + 0.28 * len(compared))
    panels = [Panel(f"{comparison.headline} against size", lambda axes: _sweep(axes, comparison, found), height=height)]
    if compared:
        title = f"difference to {comparison.baseline}"
        panels.append(Panel(title, lambda axes: _differences(axes, compared), height=height))
    return Picture("sizes", panels, tuple(scores_of(comparison)))


def learning_curves(comparison: Comparison) -> Picture:
    """The headline metric on the validation set against the step: a panel for each size."""
    panels = []
    for size in sorted({run.size for run in comparison.runs}):
        runs = [run for run in comparison.runs if run.size == size and run.curve]
        if runs:
            panels.append(Panel(f"size {size}", lambda axes, runs=runs: _curves(axes, comparison, runs)))  # type: ignore[misc]
    return Picture("curves", panels, tuple(scores_of(comparison)))


def _sweep(axes: Axes, comparison: Comparison, found: list[Row]) -> None:
    sizes = sorted({row.size for row in found})
    scores = scores_of(comparison)
    for number, score in enumerate(scores):
        shift = (number - (len(scores) - 1) / 2) * DODGE
        own = [row for row in found if row.score == score and row.n]
        places = [sizes.index(row.size) + shift for row in own]
        spread = [0.0 if math.isnan(row.std) else row.std for row in own]
        axes.errorbar(
            places, [row.mean for row in own], spread, color=colour(score), marker=marker(score), markersize=6,
            linewidth=1.6, elinewidth=1.4, capsize=3, label=score,
        )  # fmt: skip
        runs = [run for run in comparison.runs if run.score == score and math.isfinite(run.value)]
        seeds = [sizes.index(run.size) + shift for run in runs]
        axes.plot(seeds, [run.value for run in runs], ".", color=colour(score), markersize=3, alpha=0.6)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set(xlabel="size of query and key", ylabel=f"{comparison.headline}, test")
    _bounds(axes, comparison)


def _differences(axes: Axes, compared: list[Row]) -> None:
    for place, row in enumerate(compared):
        assert row.difference is not None
        if row.difference.student and row.difference.bootstrap:
            thin, thick = row.difference.student, row.difference.bootstrap
            axes.plot([thin.low, thin.high], [place, place], color=colour(row.score), linewidth=1.2)
            axes.plot([thick.low, thick.high], [place, place], color=colour(row.score), linewidth=4, alpha=0.55)
        axes.plot(row.difference.mean, place, marker(row.score), color=colour(row.score), markersize=6)
    axes.axvline(0, color="#7b7b7b", linewidth=1)
    axes.set_yticks(range(len(compared)), [f"{row.score}, {row.size}" for row in compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("worse  ←  difference  →  better")
    axes.grid(axis="x", alpha=0.2)


def _curves(axes: Axes, comparison: Comparison, runs: list[RunResult]) -> None:
    for score in scores_of(comparison):
        by_step: dict[int, list[float]] = defaultdict(list)
        own = [run for run in runs if run.score == score]
        for run in own:
            points = [(step, value) for step, value in run.curve if math.isfinite(value)]
            for step, value in points:
                by_step[step].append(value)
            if len(own) > 1:
                axes.plot(*zip(*points, strict=True), color=colour(score), linewidth=0.6, alpha=0.5)
        # A mean over the seeds that are left would jump where one of them stops early.
        shared = sorted(step for step, values in by_step.items() if len(values) == len(own))
        means = [float(np.mean(by_step[step])) for step in shared]
        axes.plot(shared, means, color=colour(score), linewidth=2, label=score)
        low, high = ([pick(by_step[step]) for step in shared] for pick in (min, max))
        axes.fill_between(shared, low, high, color=colour(score), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel=f"{comparison.headline}, validation")
    _bounds(axes, comparison)


def _bounds(axes: Axes, comparison: Comparison) -> None:
    """Lines at what a guess reaches and at what could be reached."""
    # Each name stands where curves that rise from a guess to the optimum are not.
    for value, name, style, side in (
        (comparison.optimum, "optimum", "--", "left"),
        (comparison.chance, "guess", ":", "right"),
    ):
        if value is not None:
            axes.axhline(value, color="#7b7b7b", linewidth=1, linestyle=style)
            axes.annotate(
                name, (0 if side == "left" else 1, value), xycoords=("axes fraction", "data"), ha=side, va="bottom",
                xytext=(3 if side == "left" else -3, 2), textcoords="offset points", fontsize=8.5, color="#7b7b7b",
            )  # fmt: skip
    axes.grid(axis="y", alpha=0.2)
    axes.margins(y=0.09)
