"""``coneheads draw``: what a trained model attends to on the task's example, and where its cones put the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from numpy.typing import NDArray

from coneheads.geometry.cone_levels import penumbral_height_sq, umbral_height
from coneheads.lab.checkpoint import load_run
from coneheads.lab.commands import DrawConfig
from coneheads.lab.config import Failed
from coneheads.lab.report import cones, maps
from coneheads.lab.report.figures import Panel, Picture, colour, save_png
from coneheads.lab.tasks.base import Example
from coneheads.lab.telemetry import Call, ConePoints, cone_points, hear, observe, of_head
from coneheads.scores import Penumbral, Umbral

Array = NDArray[np.float64]
# Heights that span more than this factor are drawn on a logarithmic scale.
WIDE = 30.0
# A word is written where no other one is nearer than this, in shares of the picture.
WORD_WIDTH, WORD_HEIGHT = 0.25, 0.04
# The shadows of so many of the highest points are drawn.
SHADOWS = 5


def run(config: DrawConfig) -> int:
    """Draws all pictures of a run and prints their paths."""
    folder = Path(config.run)
    _, task, model = load_run(config.run, config.checkpoint)
    seen, example = observe(model, task), task.example()
    if example is None:
        raise Failed(f"the task of {config.run} is on a graph, of whose attention there is no map to draw")
    pictures = [maps.all_heads(seen)]
    calls = hear(model, example.batch)
    if calls and cone_points(calls[0]) is not None:
        pictures += [points(calls, example), levels(seen)]
    out = Path(config.out) if config.out is not None else folder / "figures"
    for picture in pictures:
        path = out / f"{picture.name}.png"
        try:
            save_png(picture, path)
        except OSError as error:
            raise Failed(f"--out: cannot write to {str(out)!r} ({error.strerror})") from None
        print(path)
    return 0


def levels(seen: dict[str, Any]) -> Picture:
    """The distribution of levels in each layer, over many examples."""
    panels = []
    for number, layer in enumerate(seen["layers"], 1):
        title = f"layer {number}" if len(seen["layers"]) > 1 else "levels"
        drawer = cones.level_drawer({"layers": [layer]}, layer["score"])
        panels.append(Panel(f"{title}: queries filled, keys hollow", drawer))
    return Picture("levels", panels)


def points(calls: list[Call], example: Example) -> Picture:
    """Where the tokens of the example lie, a panel for each layer and head."""
    panels = []
    for number, call in enumerate(calls, 1):
        found = cone_points(call)
        assert found is not None
        for head in range(call.query.shape[1]):
            title = f"layer {number}, head {head + 1}" if len(calls) > 1 else f"head {head + 1}"
            panels.append(points_panel(title, call, found, head, example))
    return Picture("points", panels)


def points_panel(title: str, call: Call, found: ConePoints, head: int, example: Example) -> Panel:
    """The queries and keys of one head: positions along their main direction, and heights.

    A line joins a query and a visible key of which one is the other's ancestor. If positions have one coordinate, the
    picture is exact, and the shadows of the highest points are drawn.
    """
    visible = call.visible[0, head]
    q, k = (positions[0, head].double().numpy() for positions in (found.q, found.k))
    across = main_direction(np.concatenate([q, k]))
    q_x, k_x = q @ across, k @ across
    q_level, k_level = found.q_level[0, head].double(), found.k_level[0, head].double()
    q_y, k_y = heights(found, q_level, head), heights(found, k_level, head)
    related = (found.are_related()[0, head] & visible).numpy()
    received = call.weights()[0, head].double().mean(0).numpy()

    def draw(axes: Axes) -> None:
        ink = rcParams["text.color"]
        low = _scale(axes, np.concatenate([q_y, k_y]))
        for query, key in zip(*related.nonzero(), strict=True):
            axes.plot([q_x[query], k_x[key]], [q_y[query], k_y[key]], color=ink, linewidth=0.7, alpha=0.35)
        if q.shape[1] == 1:
            _shadows(axes, found, head, np.concatenate([q_x, k_x]), torch.cat([q_level, k_level]), low)
        dots = axes.scatter(k_x, k_y, c=received, cmap=maps.COLOURS, vmin=0, vmax=1, s=34, edgecolor=ink, linewidth=0.5)
        axes.scatter(q_x, q_y, marker="D", s=38, facecolor="none", edgecolor=ink, linewidth=1.3)
        if isinstance(found.cone, Penumbral):
            axes.axhline(of_head(found.cone.light_height, head), color=ink, linewidth=0.8, linestyle=":")
        axes.figure.colorbar(dots, ax=axes, fraction=0.05, pad=0.02, label="mean weight of the key")
        order = (-received).argsort(kind="stable")
        words = [*example.queries, *(example.keys[place] for place in order)]
        _write(axes, np.concatenate([q_x, k_x[order]]), np.concatenate([q_y, k_y[order]]), words)
        exact = "position" if q.shape[1] == 1 else f"main direction of {q.shape[1]} coordinates"
        axes.set(xlabel=exact, ylabel="height" if isinstance(found.cone, Penumbral | Umbral) else "level")

    return Panel(f"{title}: queries ◇, keys ●", draw, 5.2, 4.2)


def main_direction(positions: Array) -> Array:
    """The unit vector [P] along which positions [N, P] spread most, its largest entry positive."""
    *_, directions = np.linalg.svd(positions - positions.mean(0), full_matrices=False)
    first: Array = directions[0]
    return first * np.sign(first[np.abs(first).argmax()])


def heights(found: ConePoints, level: torch.Tensor, head: int) -> Array:
    """Heights in the half-space of levels [N] that points have; under a light at the origin, the levels themselves."""
    if isinstance(found.cone, Penumbral):
        return penumbral_height_sq(level, of_head(found.cone.light_height, head)).clamp_min(0).sqrt().numpy()
    if isinstance(found.cone, Umbral):
        return umbral_height(level, of_head(found.cone.radius, head)).numpy()
    return level.numpy()


def _shadows(axes: Axes, found: ConePoints, head: int, x: Array, level: torch.Tensor, low: float) -> None:
    """The boundary of all that lies below the highest points: ``D = level - level of the boundary``."""
    for place in level.argsort(descending=True, stable=True)[:SHADOWS].tolist():
        # evenly in the root of the level, since heights near 0 go with the root of penumbral levels
        boundary = level[place] * torch.linspace(0, 1, 200, dtype=level.dtype).square()
        away = (level[place] - boundary).numpy()
        y = np.maximum(heights(found, boundary, head), low)
        axes.fill_betweenx(y, x[place] - away, x[place] + away, color=colour(found.cone.name), alpha=0.1, linewidth=0)
        for side in (x[place] - away, x[place] + away):
            axes.plot(side, y, color=colour(found.cone.name), linewidth=0.8, alpha=0.7)


def _write(axes: Axes, x: Array, y: Array, words: list[str]) -> None:
    """The words of points beside them, in this order, where there is place for one."""
    axes.get_xlim(), axes.get_ylim()  # which brings the limits up to date with what was drawn
    places = (axes.transScale + axes.transLimits).transform(np.stack([x, y], 1))  # as shares of the axes
    written: list[Array] = []
    for place, point, word in zip(places, zip(x, y, strict=True), words, strict=True):
        if all(abs(place[0] - other[0]) > WORD_WIDTH or abs(place[1] - other[1]) > WORD_HEIGHT for other in written):
            written.append(place)
            side = 1 if place[0] < 1 - WORD_WIDTH else -1  # inward, at the right edge
            note = axes.annotate(
                word, point, xytext=(5 * side, 3), textcoords="offset points", fontsize=7,
                ha="left" if side > 0 else "right",
            )  # fmt: skip
            note.set_in_layout(False)


def _scale(axes: Axes, y: Array) -> float:
    """A logarithmic axis where heights differ much; returns where the picture ends below."""
    positive = y[y > 0]
    if len(positive) == len(y) and y.max() > WIDE * y.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        low = float(y.min()) / 2
        axes.set_ylim(low, float(y.max()) * 2)
        return low
    return float(min(0.0, y.min()))
