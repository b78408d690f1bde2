"""How long things take: one repetition of each in turn, so that a disturbance of the machine meets them all."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

LEAST_REPETITIONS = 3
MOST_REPETITIONS = 2000
# A sample lasts at least this long, by several calls: the clock and Python between calls must not count.
SHORTEST_SAMPLE = 1e-3


class Timed(Hashable, Protocol):
    """What a call is known by: a run of a benchmark."""

    @property
    def threads(self) -> int: ...
    @property
    def yardstick(self) -> Timed: ...


R = TypeVar("R", bound=Timed)


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call: median, 20th and 80th percentile, over so many repetitions."""

    median: float
    p20: float
    p80: float
    repetitions: int


def percentile(values: list[float], share: float) -> float:
    """Between the two nearest values, linearly.

    >>> percentile([4.0, 1.0, 3.0, 2.0, 5.0], 0.2)
    1.8
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(seconds: list[float]) -> Times:
    milliseconds = [1e3 * value for value in seconds]
    median = statistics.median(milliseconds)
    return Times(median, percentile(milliseconds, 0.2), percentile(milliseconds, 0.8), len(seconds))


def interleaved(
    calls: Mapping[R, Callable[[], object]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    between: Callable[[], None] = lambda: None,
) -> dict[R, Times]:
    """Times every call for about so many seconds, in turns whose order rotates.

    A call leaves when its time is used up; the yardsticks stay until the last one leaves. ``between`` runs between
    turns, where nothing is timed.
    """
    samples: dict[R, list[float]] = {run: [] for run in calls}
    repeats = {run: _calls_in_a_sample(run, call, clock) for run, call in calls.items()}
    spent = dict.fromkeys(calls, 0.0)
    active = list(calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        while active:
            for run in active:
                _set_threads(run.threads)
                call, count = calls[run], repeats[run]
                start = clock()
                for _ in range(count):
                    call()
                took = clock() - start
                spent[run] += took
                samples[run].append(took / count)
            between()
            unfinished = [run for run in active if not _finished(samples[run], spent[run], seconds)]
            others = [run for run in unfinished if run != run.yardstick]
            needed: set[Timed] = {run.yardstick for run in others} | set(unfinished)
            active = [run for run in active if run in needed]
            active = active[1:] + active[:1]
    finally:
        if collecting:
            gc.enable()
    return {run: summary(values) for run, values in samples.items()}


def _finished(samples: list[float], spent: float, seconds: float) -> bool:
    return len(samples) >= MOST_REPETITIONS or (spent >= seconds and len(samples) >= LEAST_REPETITIONS)


def _calls_in_a_sample(run: Timed, call: Callable[[], object], clock: Callable[[], float]) -> int:
    """Warms up, and finds how many calls make a sample."""
    _set_threads(run.threads)
    start = clock()
    call()
    if clock() - start >= 100 * SHORTEST_SAMPLE:
        return 1
    start = clock()
    for _ in range(10):
        call()
    return max(1, math.ceil(SHORTEST_SAMPLE / max((clock() - start) / 10, 1e-7)))


def _set_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


class OtherLoad:
    """The share of the processors that other programs keep busy, from its making to ``share()``; None if unknown."""

    def __init__(self) -> None:
        self._start = self._ticks()

    @staticmethod
    def _ticks() -> tuple[float, float, float] | None:
        """Seconds of all processors: busy, in total, and busy for this process."""
        try:
            first = Path("/proc/stat").read_text().splitlines()[0]
            user, nice, system, idle, waiting, *rest = map(int, first.split()[1:])
        except (OSError, ValueError):
            return None
        busy = user + nice + system + sum(rest[:3])
        hertz = 100  # what /proc/stat counts in, whatever the kernel's own clock
        return busy / hertz, (busy + idle + waiting) / hertz, time.process_time()

    def share(self) -> float | None:
        end = self._ticks()
        if self._start is None or end is None or end[1] <= self._start[1]:
            return None
        busy, total, own = (b - a for a, b in zip(self._start, end, strict=True))
        return min(1.0, max(0.0, (busy - own) / total))
