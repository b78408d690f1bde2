"""The rows of a comparison, by hand; and whether an interval holds the truth as often as it says."""

import dataclasses
import math

import numpy as np
import pytest

from coneheads.lab.results import Comparison, RunResult
from coneheads.lab.statistics import (
    BETTER,
    DIVERGED,
    NOISE,
    UNKNOWN,
    WORSE,
    bootstrap_interval,
    paired_difference,
    student_interval,
    student_quantile,
    summarise,
)


def run(score, seed, value, size=4, seconds=0.01):
    return RunResult(score, size, seed, value, {"test": {"accuracy": value}}, 100 + len(score), seconds, [], {})


def comparison(*runs, optimum=None, **changes):
    made = Comparison({"scores": ["dot", "umbral"]}, "kin", "accuracy", list(runs), optimum, None, {}, "")
    return dataclasses.replace(made, **changes)


def test_a_row_has_the_mean_and_the_standard_deviation_of_the_sample():
    runs = [run("dot", seed, value, seconds=value) for seed, value in enumerate((0.1, 0.2, 0.6))]
    (row,) = summarise(comparison(*runs, optimum=0.6))
    assert (row.n, row.diverged, row.parameters) == (3, 0, 103)
    assert row.mean == pytest.approx(0.3)
    assert row.std == pytest.approx(math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2))
    assert row.milliseconds == pytest.approx(200)  # the median
    assert row.share_of_optimum == pytest.approx(0.5)
    assert (row.difference, row.verdict) == (None, "")


def test_rows_come_by_size_and_then_in_the_order_in_which_scores_were_asked_for():
    found = summarise(comparison(run("umbral", 0, 1, size=8), run("dot", 0, 1, size=8), run("umbral", 0, 1, size=3)))
    assert [(row.size, row.score) for row in found] == [(3, "umbral"), (8, "dot"), (8, "umbral")]


def test_differences_are_paired_by_seed():
    dot = [run("dot", seed, value) for seed, value in ((0, 0.1), (1, 0.5), (2, 0.9))]
    umbral = [run("umbral", seed, value) for seed, value in ((2, 0.95), (0, 0.13), (1, 0.54), (9, 0.0))]
    _, row = summarise(comparison(*dot, *umbral))
    # 0.03, 0.04, 0.05: mean 0.04, standard deviation 0.01; the t of 2 degrees of freedom is 4.3027
    assert (row.n, row.difference.n) == (4, 3)
    assert row.difference.mean == pytest.approx(0.04)
    assert row.difference.student.low == pytest.approx(0.04 - 4.3027 * 0.01 / math.sqrt(3), abs=1e-6)
    assert row.difference.student.high == pytest.approx(0.04 + 4.3027 * 0.01 / math.sqrt(3), abs=1e-6)
    # of the 27 resamples one is all 0.03 (3.7 %, more than the 2.5 % of a tail)
    assert row.difference.bootstrap.low == pytest.approx(0.03)
    assert row.difference.bootstrap.high == pytest.approx(0.05)
    assert row.verdict == BETTER


def test_a_difference_counts_if_both_intervals_exclude_zero():
    zero = dict.fromkeys(range(3), 0.0)
    assert paired_difference({0: 0.03, 1: 0.04, 2: 0.05}, zero).verdict == BETTER
    assert paired_difference({0: -0.03, 1: -0.04, 2: -0.05}, zero).verdict == WORSE
    assert paired_difference({0: -0.03, 1: 0.04, 2: 0.05}, zero).verdict == NOISE
    # all above 0, which the bootstrap takes for proof, but too far apart for three seeds
    apart = paired_difference({0: 0.001, 1: 0.04, 2: 0.08}, zero)
    assert apart.bootstrap.excludes_zero()
    assert not apart.student.excludes_zero()
    assert apart.verdict == NOISE
    assert paired_difference(zero, zero).verdict == NOISE


def test_one_seed_has_no_spread_no_interval_and_no_verdict():
    _, row = summarise(comparison(run("dot", 0, 0.5), run("umbral", 0, 0.9)))
    assert math.isnan(row.std)
    assert row.difference.mean == pytest.approx(0.4)
    assert (row.difference.bootstrap, row.difference.student, row.verdict) == (None, None, UNKNOWN)


def test_without_the_baseline_there_is_no_difference():
    (row,) = summarise(comparison(run("umbral", 0, 0.9), run("umbral", 1, 0.8)))
    assert (row.difference, row.verdict) == (None, UNKNOWN)
    _, row = summarise(comparison(run("dot", 5, 0.9), run("umbral", 1, 0.8)))
    assert (row.difference, row.verdict) == (None, UNKNOWN)


def test_diverged_runs_are_counted_apart_and_are_never_an_advantage():
    dot = [run("dot", seed, 0.5) for seed in range(3)]
    umbral = [run("umbral", 0, math.nan), run("umbral", 1, 0.8), run("umbral", 2, 0.9)]
    _, row = summarise(comparison(*dot, *umbral))
    assert (row.n, row.diverged, row.verdict) == (2, 1, DIVERGED)
    assert row.mean == pytest.approx(0.85)
    (lost,) = summarise(comparison(run("dot", 0, math.nan), optimum=1.0))
    assert math.isnan(lost.mean)
    assert (lost.n, lost.share_of_optimum) == (0, None)


def test_the_bootstrap_gives_the_same_interval_every_time():
    values = np.random.default_rng(0).normal(size=20)
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_the_bootstrap_of_two_values_is_their_range():
    interval = bootstrap_interval(np.array([1.0, 3.0]))  # means 1, 2, 2, 3
    assert (interval.low, interval.high) == (1, 3)


def test_the_bootstrap_does_not_care_about_order_or_sign():
    values = np.array([0.1, 0.4, 0.2, 0.9, 0.3])
    interval, mirrored = bootstrap_interval(values), bootstrap_interval(-values[::-1])
    assert (interval.low, interval.high) == pytest.approx((-mirrored.high, -mirrored.low))


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (1000, 1.9623)]
)
def test_quantiles_of_student_are_those_of_the_tables(degrees, expected):
    assert student_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


def coverage(interval, n, trials=400):
    source = np.random.default_rng(n)
    found = [interval(source.normal(0.3, 0.7, size=n)) for _ in range(trials)]
    return np.mean([one.low <= 0.3 <= one.high for one in found])


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    assert coverage(student_interval, 3, trials=4000) == pytest.approx(0.95, abs=0.015)
    assert coverage(bootstrap_interval, 30) == pytest.approx(0.94, abs=0.03)
    # the reason for the second interval: of three values the bootstrap holds the truth in three cases of four
    assert coverage(bootstrap_interval, 3, trials=4000) == pytest.approx(0.75, abs=0.03)


def test_noise_is_called_a_difference_once_in_twenty_or_less():
    source = np.random.default_rng(1)
    zero = dict.fromkeys(range(3), 0.0)
    found = [paired_difference(dict(enumerate(source.normal(size=3))), zero).verdict for _ in range(2000)]
    assert 0.03 < np.mean([verdict != NOISE for verdict in found]) < 0.065
