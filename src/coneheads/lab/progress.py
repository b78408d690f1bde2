"""How far a command has come: a bar with speed and time left on a terminal, a line now and then elsewhere.

All of it goes to stderr, so that what goes to stdout, tables and JSON, can be piped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import rich.progress
from rich.console import Console
from rich.table import Column

# A bar takes 1 to 2 ms to draw, more on a busy machine: it is drawn so seldom that it costs less than 1 % of the time
# of what it shows.
REFRESH_SECONDS = 0.5
REFRESH_SHARE = 0.005
# The speed is that of the last seconds: a comparison goes from fast runs to slow ones.
WINDOW_SECONDS = 30.0
# Lines elsewhere: never closer than this, and then with every tenth of the whole or every minute.
LINE_SECONDS = 10.0
LINE_SHARE = 0.1
LINE_SECONDS_AT_MOST = 60.0

Number = float | int | str


class Progress:
    """Counts units of work, and shows how many are done. To be used in a ``with``, which ends the bar.

    quiet: nothing but warnings. total: units in all, of which ``done`` were done before. what: what is worked on.
    """

    def __init__(
        self,
        quiet: bool,
        total: int,
        what: str,
        unit: str = "steps",
        *,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet, self.total, self.what, self.unit, self.done = quiet, total, what, unit, done
        self.console = console or Console(stderr=True, highlight=False)
        self.numbers: dict[str, Number] = {}
        self._clock = clock
        self._started = self._shown = clock()
        self._done_shown = done
        self._drawn_every = REFRESH_SECONDS
        self._samples = deque([(self._started, done)])
        self._bar: rich.progress.Progress | None = None
        if not quiet and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn(
                    "{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
                ),
                console=self.console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task(what, total=total, completed=done, facts=self.facts())

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
            self._bar.refresh()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        elif not self.quiet and error is None and self.done > self._done_shown:
            self._line()

    def advance(self, n: int = 1, **numbers: Number) -> None:
        """Counts n units, and keeps the latest numbers, such as loss=0.12, to be shown."""
        self.done += n
        self.numbers |= numbers
        if self.quiet:
            return
        now = self._clock()
        if now - self._samples[-1][0] >= REFRESH_SECONDS:
            self._samples.append((now, self.done))
            while now - self._samples[0][0] > WINDOW_SECONDS and len(self._samples) > 2:
                self._samples.popleft()
        since = now - self._shown
        if self._bar:
            if since >= self._drawn_every or self.done >= self.total:
                self._shown = now
                start = time.thread_time()
                self._bar.update(self._task, completed=self.done, facts=self.facts())
                self._bar.refresh()
                self._drawn_every = max(REFRESH_SECONDS, (time.thread_time() - start) / REFRESH_SHARE)
        elif since >= LINE_SECONDS and (
            since >= LINE_SECONDS_AT_MOST or self.done - self._done_shown >= LINE_SHARE * self.total
        ):
            self._shown, self._done_shown = now, self.done
            self._line()

    def skip(self, n: int) -> None:
        """Counts n units that were done before: they say nothing about the speed."""
        self.done += n
        self._done_shown += n
        self._samples = deque((when, done + n) for when, done in self._samples)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """A line that is seen even if all is quiet."""
        self.console.print(text, soft_wrap=True, markup=False)

    def facts(self) -> str:
        """Units done, speed, time left or taken, and the latest numbers."""
        parts = [f"{self.done}/{self.total} {self.unit}"]
        if speed := self.speed():
            parts.append(f"{_short(speed)} {self.unit}/s")
        if self.done >= self.total:
            parts.append(f"took {_duration(self._clock() - self._started)}")
        elif speed:
            parts.append(f"{_duration((self.total - self.done) / speed)} left")
        parts += [f"{name}={_short(value)}" for name, value in self.numbers.items()]
        return "  ".join(parts)

    def speed(self) -> float | None:
        """Units a second lately, if there were any."""
        start, done = self._samples[0]
        seconds = self._clock() - start
        return (self.done - done) / seconds if seconds > 0 and self.done > done else None

    def _line(self) -> None:
        self.warn(f"{self.what}: {self.facts()}")


def _short(value: Number) -> str:
    """Three or four digits that count."""
    return value if isinstance(value, str) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    """As 4 s, 3:05 or 2:03:05.

    >>> _duration(4.2), _duration(185), _duration(7385)
    ('4 s', '3:05', '2:03:05')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left} s"
