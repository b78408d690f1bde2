"""The promises: each has the runs that decide it, and is judged by the numbers of those alone."""

import dataclasses

import pytest

from coneheads.lab.machine import this_machine
from coneheads.lab.speed import results, screen, targets
from coneheads.lab.speed.results import Row
from coneheads.lab.speed.runs import Result, Run

PROMISED = targets.targets("cpp")
HERE = this_machine()


def find(part, quantity="time"):
    (found,) = [target for target in PROMISED if part in target.what and target.quantity == quantity]
    return found


def test_every_line_of_the_promise_is_a_target():
    found = {(t.of.score, t.of.B, t.of.L, t.of.E, t.of.pass_, t.limit) for t in PROMISED if t.to == t.of.yardstick}
    for B, L in ((8, 512), (2, 2048), (1, 4096)):
        for score, pass_, limit in (
            ("penumbral", "forward", 1.0),
            ("umbral", "forward", 0.9),
            ("dot", "forward", 0.9),
            ("penumbral", "forward_backward", 1.0),
            ("umbral", "forward_backward", 0.95),
            *((other, pass_, 1.3) for other in targets.OTHER_SCORES for pass_ in targets.BOTH),
        ):
            assert (score, B, L, 64, pass_, limit) in found
    for pass_ in targets.BOTH:
        assert ("penumbral", 64, 197, 64, pass_, 1.0) in found
        assert ("penumbral", 8, 512, 16, pass_, 0.65) in found
        assert ("penumbral", 2, 2048, 16, pass_, 0.65) in found
    assert len([t for t in PROMISED if t.of.dtype == "bfloat16"]) == 6
    assert find("S=1024").limit == 1.2
    assert find("above SDPA", "difference").limit == 25
    assert len([t for t in PROMISED if "causal of non-causal" in t.what and t.limit == 0.6]) == 2
    assert len([t for t in PROMISED if "2 threads" in t.what and t.limit == 1.7]) == 2
    assert find("faster than the authors'").limit == 15
    assert [t.limit for t in PROMISED if t.quantity == "memory"] == [1.3, 100]


def test_all_that_a_target_needs_is_measured_with_its_yardstick():
    timed = [run for round_ in targets.rounds(PROMISED) for run in round_]
    assert len(timed) == len(set(timed))
    weighed = {run: Result(peak_mb=1.0) for run in targets.memory_runs(PROMISED)}
    weighed |= targets.extrapolated(PROMISED, weighed)
    for target in PROMISED:
        for run in (target.of, target.to):
            assert run in (weighed if target.quantity == "memory" else timed)
    for round_ in targets.rounds(PROMISED):
        assert all(run.yardstick in round_ for run in round_)


@pytest.mark.parametrize(
    ("part", "quantity", "of", "to", "shown", "holds"),
    [
        ("S=1024", "time", Result(median_ms=1.3), Result(median_ms=1.0), "1.300", "no"),
        ("S=1024", "time", Result(median_ms=0.6), Result(median_ms=1.0), "0.600", "yes"),
        ("above SDPA", "difference", Result(median_ms=0.03), Result(median_ms=0.01), "20.0 us", "yes"),
        ("above SDPA", "difference", Result(median_ms=0.05), Result(median_ms=0.01), "40.0 us", "no"),
        ("faster than the authors'", "time", Result(median_ms=20), Result(median_ms=1), "20.0x", "yes"),
        ("faster than the authors'", "time", Result(median_ms=14), Result(median_ms=1), "14.0x", "no"),
        ("of SDPA's", "memory", Result(peak_mb=13), Result(peak_mb=10), "1.300", "yes"),
        ("below the authors'", "memory", Result(peak_mb=99), Result(peak_mb=1), "99.0x", "no"),
        ("S=1024", "time", Result(), Result(median_ms=1.0), "not measured", "no"),
    ],
)
def test_a_target_is_judged_by_its_two_runs(part, quantity, of, to, shown, holds):
    target = find(part, quantity)
    value = target.value({target.of: of, target.to: to})
    assert screen.verdict_cells(target, value)[2:] == [shown, holds]


def test_the_authors_memory_grows_with_the_square_of_the_length():
    (target,) = [target for target in PROMISED if "below the authors'" in target.what]
    base = dataclasses.replace(target.of, L=8192, S=8192)
    (found,) = targets.extrapolated(PROMISED, {base: Result(peak_mb=100.0)}).values()
    assert found.peak_mb == 400
    assert "extrapolated from L=8192" in found.note
    assert targets.extrapolated(PROMISED, {}) == {}


def test_rows_survive_the_file(tmp_path):
    run = Run("cpp", "penumbral", 1, 2, 3, 4, 5, 6, "bfloat16", True, "backward", 1)
    rows = [
        Row(run, Result(1.5, 1.25, 2.0, 7, 0.5, 12.5, 1e-6, 0.25, 'a "note", with commas'), HERE),
        Row(run, Result(note="n/a"), HERE),
    ]
    writer = results.Writer(tmp_path / "folder" / "rows.csv")
    writer.write(rows[:1])
    assert results.read(writer.path) == rows[:1]
    writer.write(rows[1:])
    assert results.read(writer.path) == rows


def test_an_old_record_stays_until_the_first_new_row(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("old")
    writer = results.Writer(path)
    assert path.read_text() == "old"
    writer.write([Row(PROMISED[0].of, Result(), HERE)])
    assert len(results.read(path)) == 1


def test_verdicts_of_a_record_are_of_the_backend_that_it_measured():
    target = targets.targets("chunked")[0]
    rows = [Row(target.of, Result(median_ms=2.0), HERE), Row(target.to, Result(median_ms=4.0), HERE)]
    found = targets.verdicts(rows)
    assert found[0] == (target, 0.5)
    assert all(value is None for _, value in found[1:])
