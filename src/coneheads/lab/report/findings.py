"""What was found, in plain sentences made from the statistics. A difference within noise is called that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coneheads.lab.report.tables import interval, signed
from coneheads.lab.results import Comparison
from coneheads.lab.statistics import (
    BETTER,
    DIVERGED,
    NOISE,
    UNKNOWN,
    WORSE,
    Difference,
    Row,
    paired_difference,
    scores_of,
    student_interval,
    summarise,
    values_of,
)

CONES = ("penumbral", "umbral", "penumbral_finite", "umbral_finite")
FEW_SEEDS = 10


def findings(comparison: Comparison) -> list[str]:
    """The sentences that stand above the table, favourable or not."""
    found = summarise(comparison)
    if not found:
        return ["There are no finished runs."]
    said = [_what_ran(comparison, found)]
    said += [_against_baseline(comparison, score, found) for score in scores_of(comparison)
             if score != comparison.baseline]  # fmt: skip
    said += _cones_against_the_rest(comparison, found)
    said += _how_close(comparison, found)
    said += _diverged(found)
    said += _how_sure(comparison, found)
    return [sentence for sentence in said if sentence]


def _what_ran(comparison: Comparison, found: list[Row]) -> str:
    scores, sizes = scores_of(comparison), sorted({row.size for row in found})
    counts = sorted({row.n + row.diverged for row in found})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    runs = "1 run" if len(comparison.runs) == 1 else f"{len(comparison.runs)} runs"
    text = (
        f"{listed(scores)} on the task {comparison.task}, {_sizes(sizes)}, with {seeds} "
        f"{'seed' if counts[-1] == 1 else 'seeds'} each: {runs}, measured by "
        f"{comparison.headline} on the test set."
    )
    if comparison.chance is not None:
        text += f" A guess reaches {comparison.chance:.3f}."
    if comparison.optimum is not None:
        text += f" The best that any model can reach is {comparison.optimum:.3f}."
    return text


def _against_baseline(comparison: Comparison, score: str, found: list[Row]) -> str:
    own = [row for row in found if row.score == score]
    parts = []
    for verdict, words in (
        (BETTER, f"better than {comparison.baseline}"),
        (WORSE, f"worse than {comparison.baseline}"),
        (NOISE, f"within noise of {comparison.baseline}"),
    ):
        cases = [row for row in own if row.verdict == verdict]
        if cases:
            sizes = listed([f"{row.size} ({_mean(row)})" for row in cases])
            parts.append(f"{words} at {_plural('size', len(cases))} {sizes}")
    unknown = [row for row in own if row.verdict == UNKNOWN and row.difference is not None]
    if unknown:
        sizes = listed([f"{row.size} ({_mean(row)})" for row in unknown])
        parts.append(f"compared by a single seed, which proves nothing, at {_plural('size', len(unknown))} {sizes}")
    return f"{score} is {'; '.join(parts)}." if parts else ""


def _mean(row: Row) -> str:
    assert row.difference is not None
    return signed(row.difference.mean)


def _difference(difference: Difference) -> str:
    if difference.bootstrap is None or difference.student is None:
        return signed(difference.mean)
    # the wider one is what the verdict hangs on
    wider = max(difference.bootstrap, difference.student, key=lambda found: found.high - found.low)
    return f"{signed(difference.mean)}, 95 % {interval(wider)}"


def _cones_against_the_rest(comparison: Comparison, found: list[Row]) -> list[str]:
    """The best cone beside the best score without cones, where that is not the baseline: else it was said above."""
    parts = []
    for size in sorted({row.size for row in found}):
        own = [row for row in found if row.size == size and row.n]
        cones = [row for row in own if row.score in CONES]
        others = [row for row in own if row.score not in CONES]
        if not cones or not others:
            continue
        cone, other = (max(group, key=lambda row: row.mean) for group in (cones, others))
        difference = paired_difference(values_of(comparison, cone), values_of(comparison, other))
        if other.score == comparison.baseline or difference is None:
            continue
        word = {BETTER: "better than", WORSE: "worse than", NOISE: "within noise of", UNKNOWN: "by one seed beside"}
        parts.append(
            f"at size {size}, {cone.score} ({cone.mean:.3f}) is {word[difference.verdict]} {other.score} "
            f"({other.mean:.3f}): {_difference(difference)}"
        )
    return [f"The best cone against the best score without cones: {'; '.join(parts)}."] if parts else []


def _how_close(comparison: Comparison, found: list[Row]) -> list[str]:
    said = []
    sizes = sorted({row.size for row in found if row.n})
    best = [max((row for row in found if row.size == size and row.n), key=lambda row: row.mean) for size in sizes]
    if best and comparison.optimum:
        parts = [f"{100 * (row.share_of_optimum or 0):.1f} % ({row.score}, size {row.size})" for row in best]
        said.append(f"Of what can be reached, the highest mean reaches {listed(parts)}.")
    elif best:
        parts = [f"{row.mean:.3f} ({row.score}, size {row.size})" for row in best]
        said.append(f"The highest means are {listed(parts)}; the optimum is not known.")
    if comparison.chance is not None:
        poor = [f"{row.score} at size {row.size}" for row in found if _like_a_guess(comparison, row)]
        if poor:
            said.append(f"Not told apart from a guess: {listed(poor)}.")
    return said


def _like_a_guess(comparison: Comparison, row: Row) -> bool:
    """Whether the interval of the mean reaches down to chance; of one seed, whether the value does."""
    if comparison.chance is None or not row.n:
        return False
    values = np.array(list(values_of(comparison, row).values()))
    lowest = student_interval(values).low if len(values) > 1 else float(values[0])
    return lowest <= comparison.chance


def _diverged(found: list[Row]) -> list[str]:
    lost = [f"{row.diverged} of {row.n + row.diverged} of {row.score} at size {row.size}" for row in found
            if row.diverged]  # fmt: skip
    if not lost:
        return []
    return [
        f"Runs that diverged (their loss is no number), and are in no mean: {listed(lost)}. "
        "A score with such a run is not judged."
    ]


def _how_sure(comparison: Comparison, found: list[Row]) -> list[str]:
    judged = [row for row in found if row.verdict in (BETTER, WORSE, NOISE)]
    if not judged:
        compared = [row for row in found if row.verdict in (UNKNOWN, DIVERGED)]
        return ["From one seed no spread is known: run more seeds before believing a difference."] if compared else []
    fewest = min(row.difference.n for row in judged if row.difference)
    text = ""
    if fewest < FEW_SEEDS:
        text = f"{fewest} seeds are few: only differences well above the spread between seeds can be told from noise. "
    if len(judged) > 1:
        text += (
            f"Of {len(judged)} differences judged at 95 %, about one in twenty would be called better or worse by "
            "chance if there were none."
        )
    return [text.strip()]


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _sizes(sizes: list[int]) -> str:
    return f"query and key of {_plural('size', len(sizes))} {listed([str(size) for size in sizes])}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
