"""The tables of README and benchmarks/README.md say what the record says, and ask for it where it is missing."""

import sys

import pytest

from coneheads.lab.machine import Machine
from coneheads.lab.speed import results, targets
from coneheads.lab.speed.results import Row
from coneheads.lab.speed.runs import Result
from tests.test_docs import ROOT, load

MACHINE = Machine("2026-01-02", "abc123", "0.1.0", "2.13.0", "3.11.7", "A processor", "AVX2", 2)


@pytest.fixture
def generate(monkeypatch, tmp_path):
    module = load(ROOT / "docs/generate.py")
    monkeypatch.setattr(module.of_speed, "MEASURED", tmp_path / "targets.csv")
    yield module
    del sys.modules["generate"]


@pytest.fixture
def record(generate):
    """Everything at 0.5 of SDPA, which takes 10 ms."""
    promised = targets.targets("cpp")
    timed = [run for round_ in targets.rounds(promised) for run in round_]
    found = {
        run: Result(10.0, 9.0, 11.0, 7, 1.0) if run == run.yardstick else Result(5.0, 4.0, 6.0, 5, 0.5) for run in timed
    }
    weighed = {run: Result(peak_mb=20.0) for run in targets.memory_runs(promised)}
    weighed |= targets.extrapolated(promised, weighed)
    rows = [Row(run, result, MACHINE) for run, result in (found | weighed).items()]
    results.Writer(generate.of_speed.MEASURED).write(rows)
    return rows


def test_speed_table_has_a_row_for_every_size_and_says_where(generate, record):
    table = generate.of_speed.speed_table()
    assert "| 8, 4, 512, 64 | 10 / 10 | 0.50 / 0.50 | 0.50 / 0.50 | 0.50 / - | 0.50 / 0.50 |  |" in table
    assert "| 2, 4, 2048, 16 | 10 / 10 | 0.50 / 0.50 |" in table
    assert "| 64, 3, 197, 64 | 10 / 10 |" in table
    assert "| 1, 8, 4096, 64 bfloat16 | 10 / 10 |" in table
    assert "20 MB; SDPA 20 MB; the authors' formulation 0 GB (not run: extrapolated from L=8192 as L^2)" in table
    assert "Medians of 5 repetitions or more, on A processor (AVX2), 2 threads, torch 2.13.0" in table
    assert "at abc123, 2026-01-02." in table


def test_targets_table_has_every_target_with_a_plain_yes_or_no(generate, record):
    lines = generate.of_speed.targets_table().splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.endswith((" yes |", " no |"))]
    assert len(rows) == len(targets.targets("cpp"))
    held = sum(line.endswith(" yes |") for line in rows)
    assert lines[0].startswith(f"{held} of {len(rows)} hold. ")


def test_a_load_of_other_programs_is_told(generate, record):
    results.Writer(generate.of_speed.MEASURED).write(
        [Row(row.run, Result(**{**vars(row.result), "other_load": 0.3}), MACHINE) for row in record]
    )
    assert "other programs kept up to 30% of the processors busy" in generate.of_speed.targets_table()


def test_a_missing_record_is_an_error_with_a_sentence(generate, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert capsys.readouterr().err == "there is no targets.csv: write it with coneheads bench --preset targets\n"


def test_the_published_record_gives_the_published_tables():
    assert (ROOT / "benchmarks/results/targets.csv").is_file()
    text = (ROOT / "README.md").read_text() + (ROOT / "benchmarks/README.md").read_text()
    for row in results.read(ROOT / "benchmarks/results/targets.csv")[:1]:
        assert row.machine.cpu in text
        assert row.machine.date in text
