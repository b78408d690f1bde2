"""Turns, percentiles and budgets of the clock, with a clock that is made up."""

import statistics

import pytest

from coneheads.lab.speed import timing
from coneheads.lab.speed.runs import Run, with_yardsticks

SLOW = Run("slow", "penumbral", 1, 1, 8, 8, 4, 4, threads=1)
FAST = Run("fast", "penumbral", 1, 1, 8, 8, 4, 4, threads=1)


class Clock:
    """Goes on only when a call lets it."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def call(self, run, seconds):
        def work():
            self.now += seconds
            self.log.append(run.candidate)

        return work


def test_percentiles_are_those_of_the_statistics_module():
    values = [5.0, 1.0, 9.0, 2.0, 2.5, 7.0, 3.0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    assert timing.percentile(values, 0.2) == pytest.approx(fifths[0])
    assert timing.percentile(values, 0.8) == pytest.approx(fifths[3])
    assert timing.percentile([4.0], 0.2) == 4.0


def test_summary_is_in_milliseconds():
    assert timing.summary([0.001, 0.002, 0.006]) == timing.Times(
        pytest.approx(2), pytest.approx(1.4), pytest.approx(4.4), 3
    )


def test_calls_take_turns_in_an_order_that_rotates():
    clock = Clock()
    calls = {run: clock.call(run, 0.25) for run in (SLOW.yardstick, SLOW, FAST)}
    timing.interleaved(calls, 0.75, clock=clock)
    warm_up, turns = clock.log[:3], clock.log[3:]
    assert warm_up == ["sdpa", "slow", "fast"]
    assert turns == ["sdpa", "slow", "fast", "slow", "fast", "sdpa", "fast", "sdpa", "slow"]


def test_a_call_leaves_when_its_time_is_used_up_but_the_yardstick_stays():
    clock = Clock()
    calls = {
        SLOW.yardstick: clock.call(SLOW.yardstick, 0.125),
        SLOW: clock.call(SLOW, 2.0),
        FAST: clock.call(FAST, 0.25),
    }
    times = timing.interleaved(calls, 1.0, clock=clock)
    assert times[FAST].repetitions == 4
    assert times[SLOW].repetitions == timing.LEAST_REPETITIONS
    assert times[SLOW.yardstick].repetitions == 8
    assert times[SLOW].median == pytest.approx(2000)


def test_short_calls_are_timed_by_several_at_once():
    clock = Clock()
    times = timing.interleaved({FAST: clock.call(FAST, 1e-5)}, 0.01, clock=clock)
    assert times[FAST].median == pytest.approx(0.01)
    assert len(clock.log) >= 100 * times[FAST].repetitions


def test_other_load_is_a_share():
    load = timing.OtherLoad()
    sum(range(2_000_000))
    share = load.share()
    assert share is None or 0 <= share <= 1


def test_the_yardstick_of_a_run_has_E_equal_to_Ev_and_comes_once():
    run = Run("cpp", "penumbral", 8, 4, 512, 512, 16, 64, dtype="bfloat16", causal=True, pass_="backward", threads=1)
    assert run.yardstick == Run("sdpa", "dot", 8, 4, 512, 512, 64, 64, "bfloat16", True, "backward", 1)
    other = Run("cpp", "umbral", 8, 4, 512, 512, 64, 64, "bfloat16", True, "backward", 1)
    assert with_yardsticks((run, other)) == (run.yardstick, run, other)
