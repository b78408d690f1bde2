"""What is seen of a benchmark: tables and a bar of progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from coneheads.lab.speed.results import Row
from coneheads.lab.speed.targets import Target

# Drawing costs time on the processor that is being measured, so it is done seldom and never while a call is timed.
REFRESH_SECONDS = 0.5


class Screen:
    """Prints rows as they are found. To be used in a ``with``, which ends the bar of progress."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            auto_refresh=False,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps)
        self._drawn = 0.0

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def doing(self, what: str, steps: int = 0) -> None:
        """Shows what is done now, and counts the steps that were done before."""
        self._progress.update(self._task, description=what, advance=steps)
        self._progress.refresh()

    def keep_alive(self) -> None:
        """To be called between measurements."""
        if self.console.is_terminal and time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._progress.refresh()
            self._drawn = time.monotonic()

    def rows(self, title: str, rows: list[Row]) -> None:
        """The rows of one round."""
        header = ["candidate", "score", "sizes", "median ms", "20-80 %", "of SDPA", "peak MB", "error"]
        self.table(title, header, [row_cells(row) for row in rows])

    def table(self, title: str, header: list[str], cells: list[list[str]]) -> None:
        if not self.console.is_terminal:
            self.say(title)
            self._lines([header, *cells])
            return
        table = Table(*header, title=title, title_justify="left")
        for line in cells:
            table.add_row(*line)
        self.console.print(table)

    def verdicts(self, found: Sequence[tuple[Target[Any], float | None]]) -> None:
        header = ["target", "promised", "measured", "holds"]
        cells = [verdict_cells(target, value) for target, value in found]
        if not self.console.is_terminal:
            self._lines([header, *cells])
        else:
            table = Table(*header)
            for line in cells:
                table.add_row(*line)
            self.console.print(table)
        held = sum(line[-1] == "yes" for line in cells)
        self.say(f"{held} of {len(cells)} targets hold")

    def _lines(self, cells: list[list[str]]) -> None:
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        for line in cells:
            self.say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def row_cells(row: Row) -> list[str]:
    run, result = row.run, row.result
    setting = f"{run.sizes}{' causal' if run.causal else ''}{'' if run.dtype == 'float32' else f' {run.dtype}'}"
    timed = result.median_ms is not None
    return [
        run.candidate,
        run.score,
        f"{setting} {run.threads}t",
        milliseconds(result.median_ms) if timed else f"n/a: {result.note}" if result.peak_mb is None else "",
        f"{milliseconds(result.p20_ms)}-{milliseconds(result.p80_ms)}" if timed else "",
        "" if result.ratio_to_sdpa is None else f"{result.ratio_to_sdpa:.2f}",
        "" if result.peak_mb is None else f"{result.peak_mb:.1f}",
        "" if result.parity_error is None else f"{result.parity_error:.0e}",
    ]


def verdict_cells(target: Target[Any], value: float | None) -> list[str]:
    if value is None:
        return [target.what, target.promise, "not measured", "no"]
    return [target.what, target.promise, target.shown(value), "yes" if target.holds(value) else "no"]


def milliseconds(value: float | None) -> str:
    """Three digits that count."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
