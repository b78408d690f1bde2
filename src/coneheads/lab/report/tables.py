"""The numbers of a comparison as words in cells: for the page, and for a terminal."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table
from rich.text import Text

from coneheads.lab.results import Comparison
from coneheads.lab.statistics import BETTER, DIVERGED, NOISE, WORSE, Interval, Row, summarise

NONE = "\N{EN DASH}"
STYLES = {BETTER: "green", WORSE: "red", NOISE: "dim", DIVERGED: "red"}


def header(comparison: Comparison) -> list[str]:
    """The names of the columns of ``cells``."""
    named = ["score", comparison.headline, "n", f"difference to {comparison.baseline}", "bootstrap 95 %"]
    named += ["Student 95 %", "verdict", "parameters", "ms/step"]
    return [*named, "% of optimum"] if comparison.optimum is not None else named


def cells(row: Row, comparison: Comparison) -> list[str]:
    """A row as text."""
    difference = row.difference
    text = [
        row.score,
        mean_and_spread(row),
        f"{row.n} of {row.n + row.diverged}" if row.diverged else str(row.n),
        signed(difference.mean) if difference else NONE,
        interval(difference.bootstrap) if difference else NONE,
        interval(difference.student) if difference else NONE,
        row.verdict or "baseline",
        f"{row.parameters:,}",
        f"{row.milliseconds:.3g}",
    ]
    if comparison.optimum is not None:
        text.append(NONE if row.share_of_optimum is None else f"{100 * row.share_of_optimum:.1f}")
    return text


def screen_table(comparison: Comparison) -> Table:
    """The table for a terminal of 80 columns. The page has Student's interval too; the verdict goes by both."""
    found = summarise(comparison)
    counts = {row.n for row in found if not row.diverged}
    seeds = f"n = {counts.pop()}" if len(counts) == 1 else "(n)"
    title = f"{comparison.task}: {comparison.headline} on the test set, mean ± standard deviation over seeds"
    caption = "better or worse: Student's interval, which is wider for few seeds, excludes 0 too"
    # No lines between columns, and a space for padding: so it fits.
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.title_justify = table.caption_justify = "left"
    names = ["size", "score", f"{comparison.headline}\n{seeds}", f"to\n{comparison.baseline}", "bootstrap\n95 %"]
    names += ["verdict", "params", "ms a\nstep"] + (["% of\nbest"] if comparison.optimum is not None else [])
    for name in names:
        table.add_column(name, justify="left" if name in ("score", "verdict") else "right", no_wrap=True)
    before = None
    for row in found:
        if before is not None and row.size != before:
            table.add_section()
        score, mean, n, difference, bootstrap, _, verdict, *rest = cells(row, comparison)
        mean = mean.replace(" ", "") + ("" if seeds != "(n)" and not row.diverged else f" ({n})")
        bootstrap = bootstrap.strip("[]").replace(", ", "..")
        size = str(row.size) if row.size != before else ""
        table.add_row(size, score, mean, difference, bootstrap, Text(verdict, STYLES.get(row.verdict, "")), *rest)
        before = row.size
    return table


def mean_and_spread(row: Row) -> str:
    """
    >>> from coneheads.lab.statistics import Row
    >>> mean_and_spread(Row(3, "dot", 2, 0, 0.5, 0.01, None, "", 1, 1.0, None))
    '0.500 ± 0.010'
    """
    if not row.n:
        return NONE
    return f"{row.mean:.3f}" if math.isnan(row.std) else f"{row.mean:.3f} ± {row.std:.3f}"


def signed(value: float) -> str:
    """Three decimals with a sign; a zero has none.

    >>> signed(0.0714), signed(-0.0001)
    ('+0.071', '0.000')
    """
    text = f"{value:+.3f}"
    return text if float(text) else "0.000"


def interval(found: Interval | None) -> str:
    """
    >>> interval(Interval(-0.1, 0.25))
    '[-0.100, +0.250]'
    """
    return NONE if found is None else f"[{signed(found.low)}, {signed(found.high)}]"
