"""What the runs of a comparison say about each score: mean and spread, and the paired difference to the baseline.

Runs of one seed saw the same examples in the same order, so scores are compared seed by seed. Two 95 % intervals of the
mean difference are computed. The percentile bootstrap assumes nothing of the distribution; but of three numbers it is
no wider than their range, which holds the true mean in three cases of four. Student's t is wide enough even then,
if differences are about normal. So a difference counts only if BOTH exclude 0, and is within noise otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coneheads.lab.results import Comparison, RunResult

CONFIDENCE = 0.95
RESAMPLES = 10_000
BOOTSTRAP_SEED = 0
# Up to so many seeds n, all n^n resamples are enumerated: there is nothing random in the interval.
ENUMERATED = 6

BETTER, WORSE, NOISE = "better", "worse", "within noise"
#: of a score with too few common seeds for an interval, and of one with a run that ended in no number
UNKNOWN, DIVERGED = "not known", "diverged"


@dataclass(frozen=True)
class Interval:
    """From low to high."""

    low: float
    high: float

    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Difference:
    """Of the headline metric to the baseline's, over the seeds that both have. No intervals from one seed."""

    n: int
    mean: float
    bootstrap: Interval | None
    student: Interval | None

    @property
    def verdict(self) -> str:
        """Better or worse if both intervals exclude 0."""
        if self.bootstrap is None or self.student is None:
            return UNKNOWN
        if not (self.bootstrap.excludes_zero() and self.student.excludes_zero()):
            return NOISE
        return BETTER if self.mean > 0 else WORSE


@dataclass(frozen=True)
class Row:
    """One score at one size. Runs that ended in no number (NaN) are counted apart and are in no mean."""

    size: int
    score: str
    n: int
    diverged: int
    mean: float  # NaN if all runs diverged
    std: float  # of the sample, with n - 1; NaN if n < 2
    difference: Difference | None  # None: of the baseline itself, or if it has no common seed with it
    verdict: str  # "" of the baseline itself
    parameters: int
    milliseconds: float  # per step, the median over runs
    share_of_optimum: float | None


def summarise(comparison: Comparison) -> list[Row]:
    """A row for each size and score: sizes ascending, scores in the order in which they were asked for."""
    found = []
    for size in sorted({run.size for run in comparison.runs}):
        at_size = [run for run in comparison.runs if run.size == size]
        baseline = _values(run for run in at_size if run.score == comparison.baseline)
        for score in scores_of(comparison):
            runs = [run for run in at_size if run.score == score]
            if runs:
                found.append(_row(comparison, runs, baseline))
    return found


def scores_of(comparison: Comparison) -> list[str]:
    """The scores that have runs, in the order in which they were asked for."""
    present = list(dict.fromkeys(run.score for run in comparison.runs))
    asked = [score for score in comparison.config.get("scores", ()) if score in present]
    return asked + [score for score in present if score not in asked]


def _row(comparison: Comparison, runs: list[RunResult], baseline: dict[int, float]) -> Row:
    score = runs[0].score
    values = _values(runs)
    mean = float(np.mean(list(values.values()))) if values else math.nan
    diverged = len(runs) - len(values)
    difference, verdict = None, ""
    if score != comparison.baseline:
        difference = paired_difference(values, baseline)
        verdict = DIVERGED if diverged else difference.verdict if difference else UNKNOWN
    return Row(
        size=runs[0].size,
        score=score,
        n=len(values),
        diverged=diverged,
        mean=mean,
        std=float(np.std(list(values.values()), ddof=1)) if len(values) > 1 else math.nan,
        difference=difference,
        verdict=verdict,
        parameters=runs[0].parameters,
        milliseconds=1000 * float(np.median([run.seconds_per_step for run in runs])),
        share_of_optimum=mean / comparison.optimum if comparison.optimum and values else None,
    )


def values_of(comparison: Comparison, row: Row) -> dict[int, float]:
    """The headline metric by seed, of the runs that a row is the mean of."""
    return _values(run for run in comparison.runs if (run.size, run.score) == (row.size, row.score))


def _values(runs: Iterable[RunResult]) -> dict[int, float]:
    """The headline metric by seed, of runs that ended in a number."""
    return {run.seed: run.value for run in runs if math.isfinite(run.value)}


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> Difference | None:
    """The mean of ``values - baseline`` over common seeds, with its intervals; None without a common seed.

    >>> found = paired_difference({0: 0.8, 1: 0.9, 2: 0.7, 7: 0.1}, {0: 0.5, 1: 0.5, 2: 0.5})
    >>> found.n, round(found.mean, 6), found.verdict
    (3, 0.3, 'better')
    """
    common = sorted(values.keys() & baseline.keys())
    if not common:
        return None
    differences = np.array([values[seed] - baseline[seed] for seed in common])
    if len(differences) == 1:
        return Difference(1, float(differences[0]), None, None)
    return Difference(
        len(differences), float(differences.mean()), bootstrap_interval(differences), student_interval(differences)
    )


def bootstrap_interval(values: NDArray[np.float64]) -> Interval:
    """The percentile bootstrap interval of the mean of values [n].

    All n^n resamples for n up to 6, else 10,000 of a fixed seed: the same values always give the same interval.
    """
    n = len(values)
    if n <= ENUMERATED:
        chosen = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        chosen = np.random.default_rng(BOOTSTRAP_SEED).integers(n, size=(RESAMPLES, n))
    means = values[chosen].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    # The sample's own quantiles, not points between them: a mean of resampled values lies at or beyond each end.
    low = np.quantile(means, tail, method="inverted_cdf")
    high = -np.quantile(-means, tail, method="inverted_cdf")
    return Interval(float(low), float(high))


def student_interval(values: NDArray[np.float64]) -> Interval:
    """``mean +- t s / sqrt(n)``, t the quantile of Student's distribution with n - 1 degrees of freedom."""
    n = len(values)
    half = student_quantile((1 + CONFIDENCE) / 2, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    mean = float(values.mean())
    return Interval(mean - half, mean + half)


def student_quantile(probability: float, degrees: int) -> float:
    """The t that a value of Student's distribution stays below with this probability, at least 1/2.

    >>> round(student_quantile(0.975, 2), 4), round(student_quantile(0.975, 9), 4)
    (4.3027, 2.2622)
    """
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(degrees)), in which the distribution is a finite sum
    for _ in range(60):
        middle = (low + high) / 2
        if (1 + _within(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability of |t| < sqrt(degrees) tan(angle): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
