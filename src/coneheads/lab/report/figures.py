"""How pictures are made: panels that a page shows one by one as SVG, and a file shows together as PNG.

A panel is a function that draws on axes. On a narrow screen panels stand below one another, and stay readable.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Colours that the colour-blind can tell apart (Okabe and Ito), on white and on black; and a marker each.
LOOKS = {
    "dot": ("#7b7b7b", "s"),
    "laplacian": ("#e69f00", "^"),
    "penumbral": ("#0080c6", "o"),
    "umbral": ("#d55e00", "D"),
    "penumbral_finite": ("#56b4e9", "v"),
    "umbral_finite": ("#cc79a7", "P"),
    "half_space": ("#009e73", "X"),
    "hyperboloid": ("#a89a00", "*"),
}
UNKNOWN_LOOK = ("#7b7b7b", "h")
# What text and axes are drawn in: replaced by the colour of the page's text in an SVG.
INK = "#010203"
PNG_INK = "#222222"
COLUMNS = 3
STYLE: dict[str, Any] = {
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # a word may hold a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "coneheads",  # the same names of clip paths every time
}


@dataclass(frozen=True)
class Panel:
    """One plot: what it shows, and the function that draws it; sizes in inches."""

    title: str
    draw: Callable[[Axes], None]
    width: float = 4.4
    height: float = 3.2


@dataclass(frozen=True)
class Picture:
    """Panels that belong together, in a file of this name; and the scores that its legend explains."""

    name: str
    panels: list[Panel]
    scores: tuple[str, ...] = ()


def colour(score: str) -> str:
    return LOOKS.get(score, UNKNOWN_LOOK)[0]


def marker(score: str) -> str:
    return LOOKS.get(score, UNKNOWN_LOOK)[1]


@contextmanager
def _drawing(ink: str) -> Iterator[None]:
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color",
            "grid.color", "legend.labelcolor")  # fmt: skip
    settings: Any = {**STYLE, **dict.fromkeys(inks, ink)}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # The page's reader has more fonts than matplotlib, and a box in place of a rare sign is no failure.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


def svg(panel: Panel) -> str:
    """The panel as an SVG element for a page: no size of its own, and in the colour of the text around it."""
    with _drawing(INK):
        figure = Figure(figsize=(panel.width, panel.height), layout="constrained")
        axes = figure.subplots()
        panel.draw(axes)
        axes.set_title(panel.title)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) (?:width="[^"]*" )?height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(panel.title)}"', 1)


def save_png(picture: Picture, path: Path, dpi: int = 130) -> None:
    """All panels of a picture in one file, with its legend below."""
    columns = 2 if len(picture.panels) == 4 else min(COLUMNS, len(picture.panels))
    rows = math.ceil(len(picture.panels) / columns)
    width = columns * max(panel.width for panel in picture.panels)
    height = rows * max(panel.height for panel in picture.panels)
    with _drawing(PNG_INK):
        figure = Figure(figsize=(width, height + (0.4 if picture.scores else 0)), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(places, picture.panels, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title)
        for axes in places[len(picture.panels) :]:
            axes.set_axis_off()
        if picture.scores:
            handles = [Line2D([], [], color=colour(s), marker=marker(s), label=s) for s in picture.scores]
            figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)
