"""A bar on a terminal, a line now and then elsewhere, nothing if told to be quiet; always on stderr, at little cost."""

import io
import itertools
import re
import time

import pytest
from rich.console import Console

from coneheads.lab.progress import Progress


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def watched(seconds, total, *, terminal=False, quiet=False, n=1, width=120, done=0):
    """What is written while units are done, each in so many seconds."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False)
    with Progress(quiet, total, "kin", console=console, clock=clock, done=done) as progress:
        for index in range(done, total, n):
            clock.now += seconds * n
            progress.advance(n, loss=1 / (index + 1), accuracy=0.25)
            if index == total // 2:
                progress.say("half [done]")
    return out.getvalue()


def test_elsewhere_there_is_a_line_for_every_tenth():
    lines = watched(0.5, 1000).splitlines()
    assert "half [done]" in lines
    lines.remove("half [done]")
    assert lines[0] == "kin: 100/1000 steps  2 steps/s  7:30 left  loss=0.01  accuracy=0.25"
    assert [int(re.search(r"(\d+)/1000", line)[1]) for line in lines] == list(range(100, 1001, 100))
    assert "took 8:20" in lines[-1]
    assert not any("\x1b" in line for line in lines)


def test_elsewhere_short_work_has_one_line_and_long_work_one_a_minute():
    assert [line for line in watched(0.001, 1000).splitlines() if "1000/1000" in line]
    assert len(watched(0.001, 1000).splitlines()) == 2  # with what was said
    assert len(watched(0.1, 200).splitlines()) == 1 + 2  # ten seconds apart
    lines = [line for line in watched(10, 1000).splitlines() if line.startswith("kin")]
    assert len(lines) == pytest.approx(10 * 1000 / 60, abs=2)
    assert all("0.1 steps/s" in line for line in lines)


def test_a_terminal_has_a_bar_that_goes_away():
    text = watched(0.1, 100, terminal=True)
    assert "━" in text
    assert "10 steps/s" in text
    assert "5 s left" in text
    assert "100/100 steps" in text
    assert "half [done]" in text
    assert text.endswith("\x1b[1A\x1b[2K")  # the last line is wiped


def test_a_narrow_terminal_keeps_the_bar_in_one_line():
    text = watched(0.1, 100, terminal=True, width=60)
    assert text.count("\n") == 2  # what was said, and the end


def test_quiet_leaves_warnings_alone():
    assert watched(10, 100, quiet=True) == ""
    assert watched(10, 100, quiet=True, terminal=True) == ""
    out = io.StringIO()
    with Progress(True, 10, "kin", console=Console(file=out)) as progress:
        progress.say("nothing")
        progress.warn("the loss is not a number")
    assert out.getvalue() == "the loss is not a number\n"


def test_what_was_done_before_does_not_count_as_speed():
    lines = watched(0.5, 1000, done=600).splitlines()
    assert lines[0].startswith("kin: 700/1000 steps  2 steps/s  2:30 left")


def test_speed_is_that_of_late():
    out, clock = io.StringIO(), Clock()
    with Progress(False, 10_000, "kin", unit="runs", console=Console(file=out, width=200), clock=clock) as progress:
        for seconds in [0.01] * 3000 + [1.0] * 60:
            clock.now += seconds
            progress.advance()
        assert progress.speed() == pytest.approx(1, rel=0.05)
        assert "1 runs/s" in progress.facts()


def test_work_that_fails_has_no_last_line():
    out = io.StringIO()

    def work():
        with Progress(False, 10, "kin", console=Console(file=out)) as progress:
            progress.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert out.getvalue() == ""


def test_progress_goes_to_stderr(capsys):
    with Progress(False, 10, "kin") as progress:
        progress.say("hello")
        progress.advance(10, runs="3/4")
    out, complaint = capsys.readouterr()
    assert out == ""
    assert complaint.startswith("hello\nkin: 10/10 steps")
    assert "runs=3/4" in complaint


def test_numbers_come_in_few_digits():
    out = io.StringIO()
    with Progress(False, 1, "kin", console=Console(file=out, width=40)) as progress:
        progress.advance(loss=0.123456, count=123456, share=1e-9)
    assert out.getvalue().rstrip().endswith("loss=0.1235  count=123456  share=1e-09")


def test_a_bar_costs_less_than_a_hundredth_of_steps_of_5_ms():
    steps, each = 4000, 0.005
    now = 0.0

    def spent():
        nonlocal now
        console = Console(file=io.StringIO(), force_terminal=True, width=120)
        seconds = 0.0
        with Progress(False, steps, "kin", console=console, clock=lambda: now) as progress:
            for index in range(steps):
                now += each
                start = time.thread_time()
                progress.advance(loss=1 / (index + 1), accuracy=index / steps)
                seconds += time.thread_time() - start
        return seconds

    # Other tests run at the same time and share the processor's caches: the cheapest of a few counts.
    assert any(spent() < 0.01 * steps * each for _ in range(5))


def test_a_bar_that_is_slow_to_draw_is_drawn_seldom(monkeypatch):
    now, drawn, ticks = 0.0, [], itertools.count()
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(False, 10_000, "kin", console=console, clock=lambda: now) as progress:
        # Each drawing asks twice for the time spent, before and after: it takes 50 ms.
        monkeypatch.setattr(time, "thread_time", lambda: 0.05 * next(ticks))
        monkeypatch.setattr(progress._bar, "refresh", lambda: drawn.append(now))
        for _ in range(9_999):
            now += 0.01
            progress.advance()
        monkeypatch.undo()
    assert len(drawn) == pytest.approx(100 / (0.05 / 0.005), abs=1)
