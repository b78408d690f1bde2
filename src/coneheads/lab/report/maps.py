"""Attention maps: what each query of the example gives to each key."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from coneheads.lab.report.figures import Panel, Picture
from coneheads.lab.results import Comparison, RunResult
from coneheads.lab.statistics import scores_of

# Words beyond this length are cut, and of more than so many words only every n-th is written.
LONGEST_WORD = 18
MOST_WORDS = 40
INCHES_A_WORD = 0.19
COLOURS = "viridis"


def shown_runs(comparison: Comparison) -> list[RunResult]:
    """The runs that are looked at: of each score the first seed at the smallest size, where scores differ most."""
    size = min((run.size for run in comparison.runs), default=0)
    found = []
    for score in scores_of(comparison):
        runs = [run for run in comparison.runs if run.score == score and run.size == size and run.telemetry]
        if runs:
            found.append(min(runs, key=lambda run: run.seed))
    return found


def compared(comparison: Comparison) -> Picture | None:
    """The same head on the same example for each score; all heads of a layer if there is one query."""
    runs = [run for run in shown_runs(comparison) if run.telemetry["example"]["maps"]]
    if not runs:
        return None
    example = runs[0].telemetry["example"]
    if len(example["queries"]) == 1:
        panels = []
        for head in range(min(_heads(run) for run in runs)):
            weights = np.array([run.telemetry["example"]["maps"][-1][head][0] for run in runs])
            scores = [run.score for run in runs]
            panels.append(panel(f"head {head + 1}", weights, scores, example["keys"], "", example["answer"]))
        return Picture("maps", panels)
    layer, head = sharpest_head(runs)
    panels = []
    for run in runs:
        weights = np.array(run.telemetry["example"]["maps"][layer][head])
        panels.append(panel(run.score, weights, example["queries"], example["keys"], answer=example["answer"]))
    return Picture("maps", panels)


def which(comparison: Comparison) -> str:
    """In words, what ``compared`` shows."""
    runs = shown_runs(comparison)
    example = runs[0].telemetry["example"]
    where = f"Size {runs[0].size}, seed {runs[0].seed}"
    if len(example["queries"]) == 1:
        return f"{where}; a row for each score, a panel for each head."
    layer, head = sharpest_head(runs)
    return f"{where}, layer {layer + 1}, head {head + 1} of each score: on average over the scores the sharpest head."


def sharpest_head(runs: list[RunResult]) -> tuple[int, int]:
    """The layer and head whose entropy is the least, on average over runs that all have it."""
    layers = min(len(run.telemetry["layers"]) for run in runs)
    heads = min(_heads(run) for run in runs)
    entropies = {
        (layer, head): sum(run.telemetry["layers"][layer]["heads"][head]["entropy"] or 0.0 for run in runs)
        for layer in range(layers)
        for head in range(heads)
    }
    return min(entropies, key=entropies.__getitem__)


def _heads(run: RunResult) -> int:
    return len(run.telemetry["example"]["maps"][-1])


def panel(
    title: str,
    weights: NDArray[np.float64],
    queries: list[str],
    keys: list[str],
    ylabel: str = "query",
    answer: int | None = None,
) -> Panel:
    """A map of weights [L, S], as large as its words need; the key that holds the answer is framed."""
    rows, columns = (min(MOST_WORDS, n) for n in weights.shape)
    letters = max((len(_cut(word)) for word in keys), default=0)
    width = min(7.0, max(4.4, 1.6 + INCHES_A_WORD * columns))
    height = min(8.0, 0.9 + 0.08 * letters + INCHES_A_WORD * max(rows, 2))

    def draw(axes: Axes) -> None:
        image = axes.imshow(weights, cmap=COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        _words(axes, "x", keys)
        _words(axes, "y", queries)
        axes.set_ylabel(ylabel)
        if answer is not None:
            frame = Rectangle((answer - 0.5, -0.5), 1, len(weights), fill=False, edgecolor="tab:red", linewidth=2)
            axes.add_patch(frame).set_clip_on(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, ticks=[0, 0.5, 1])
        bar.outline.set_visible(False)

    return Panel(title, draw, width, height)


def _words(axes: Axes, axis: str, words: list[str]) -> None:
    step = -(-len(words) // MOST_WORDS)
    places = range(0, len(words), step)
    labels = [_cut(words[place]) for place in places]
    if axis == "x":
        axes.set_xticks(places, labels, rotation=90, fontsize=8.5)
    else:
        axes.set_yticks(places, labels, fontsize=8.5)


def _cut(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else word[: LONGEST_WORD - 1] + "…"


def all_heads(telemetry: dict[str, Any]) -> Picture:
    """Every layer and head of one model on the example; if there is one query, a panel for each layer."""
    example = telemetry["example"]
    several = len(example["maps"]) > 1
    panels = []
    for number, maps in enumerate(example["maps"], 1):
        layer = f"layer {number}" if several else ""
        if len(example["queries"]) == 1:
            weights = np.array([head[0] for head in maps])
            names = [f"head {head + 1}" for head in range(len(maps))]
            panels.append(panel(layer or "attention", weights, names, example["keys"], "", example["answer"]))
            continue
        for head, weights in enumerate(maps, 1):
            title = f"{layer}, head {head}" if several else f"head {head}"
            panels.append(
                panel(title, np.array(weights), example["queries"], example["keys"], answer=example["answer"])
            )
    return Picture("attention", panels)
