"""The report of a comparison: what was found, in words, numbers and pictures, in one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from coneheads.lab.report import cones, maps, plots
from coneheads.lab.report.figures import save_png
from coneheads.lab.report.findings import findings
from coneheads.lab.report.page import page
from coneheads.lab.report.tables import screen_table
from coneheads.lab.results import Comparison

__all__ = ["findings", "screen_table", "write_report"]

REPORT = "report.html"
FIGURES = "figures"


def write_report(comparison: Comparison, folder: Path) -> Path:
    """Writes ``report.html``, and its pictures as ``figures/*.png`` too, to the folder; returns the page's path."""
    made = [
        plots.size_sweep(comparison), plots.learning_curves(comparison), maps.compared(comparison),
        cones.plots(comparison),
    ]  # fmt: skip
    pictures = {picture.name: picture for picture in made if picture is not None and picture.panels}
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures.values():
        save_png(picture, folder / FIGURES / f"{picture.name}.png")
    path = folder / REPORT
    path.write_text(page(comparison, pictures), encoding="utf-8")
    return path
