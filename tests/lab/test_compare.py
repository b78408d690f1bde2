"""`coneheads compare`: what it trains, writes and says; that it goes on, repeats itself and tells of failures."""

import csv
import json
import os
import signal
import subprocess
import time

import pytest

from coneheads.lab import compare
from coneheads.lab.commands import CompareConfig
from coneheads.lab.config import from_dict
from coneheads.lab.results import read_run
from tests.lab.programs import command, coneheads

FLAGS = [
    "compare", "--task.branching=3", "--task.depth=3", "--task.set_size=6", "--task.values=4", "--task.examples=100",
    "--scores=dot,umbral", "--sizes=3", "--seeds=0,1", "--model.width=16", "--model.heads=1", "--train.batch=32",
    "--train.steps=30", "--train.eval_every=10", "--out=cmp",
]  # fmt: skip


def run(folder, *more):
    done = coneheads(*FLAGS, *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def numbers(folder):
    """All that must not change from run to run: not the time that a step took."""
    with (folder / "cmp/results.csv").open() as file:
        return [{name: row[name] for name in row if name != "seconds_per_step"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    done = run(folder, "--jobs=2")
    return folder, done, numbers(folder)


def test_it_trains_every_score_size_and_seed_and_says_where_the_report_is(compared):
    folder, done, found = compared
    assert done.stdout.splitlines()[-1] == "report: cmp/report.html"
    for word in ("dot", "umbral", "accuracy"):
        assert word in done.stdout
    assert "120/120 steps" in done.stderr
    assert [(row["score"], row["size"], row["seed"]) for row in found] == [
        ("dot", "3", "0"), ("umbral", "3", "0"), ("dot", "3", "1"), ("umbral", "3", "1"),
    ]  # fmt: skip
    assert (folder / "cmp/report.html").read_text().startswith("<!doctype html>")


def test_results_hold_statistics_and_runs(compared):
    folder = compared[0]
    found = json.loads((folder / "cmp/results.json").read_text())
    assert len(found["rows"]) == 2
    assert len(found["runs"]) == 4
    assert found["optimum"] == 1.0
    assert 0 < found["chance"] < 1
    assert found["findings"]
    assert from_dict(CompareConfig, found["config"]).sizes == (3,)


def test_every_run_has_its_record_metrics_telemetry_and_config(compared):
    folder = compared[0]
    runs = list((folder / "cmp/runs").iterdir())
    assert len(runs) == 4
    for path in runs:
        assert read_run(path).parameters > 0
        for name in ("run.json", "metrics.jsonl", "telemetry.json", "config.yaml"):
            assert (path / name).is_file()


def test_called_again_it_reuses_finished_runs_and_trains_what_is_new(compared):
    folder, _, before = compared
    again = run(folder)
    assert "4 of 4 runs were finished before" in again.stderr
    assert numbers(folder) == before
    more = run(folder, "--seeds=0,1,2")
    assert "4 of 6 runs were finished before" in more.stderr
    assert numbers(folder)[:4] == before


def test_other_flags_make_other_runs(compared):
    folder = compared[0]
    before = len(list((folder / "cmp/runs").iterdir()))
    run(folder, "--scores=dot", "--seeds=0", "--train.lr=0.02", "-q")
    assert len(list((folder / "cmp/runs").iterdir())) == before + 1


def test_one_job_gives_the_numbers_of_two(compared, tmp_path):
    run(tmp_path, "--jobs=1", "-q")
    assert numbers(tmp_path) == compared[2]


def test_quiet_prints_the_results_alone(tmp_path):
    done = run(tmp_path, "--scores=dot", "--seeds=0", "-q")
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "report: cmp/report.html"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_stopped_at_any_moment_it_leaves_no_process_behind_and_goes_on(compared, tmp_path, sent):
    process = subprocess.Popen(
        command(*FLAGS, "--train.steps=2000", "--train.save_every=10"), cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not list(tmp_path.glob("cmp/runs/*/checkpoints/index.json")):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(sent)
    assert process.wait(timeout=30) == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    for _ in range(100):
        if not group_is_alive(process.pid):
            break
        time.sleep(0.1)
    assert not group_is_alive(process.pid)


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_that_diverges_is_a_result_and_one_that_fails_ends_the_comparison(tmp_path):
    done = run(tmp_path, "--train.lr=1e30", "--train.warmup=0", "--scores=dot", "--seeds=0", "-q")
    assert "diverged" in done.stdout
    assert json.loads((tmp_path / "cmp/results.json").read_text())["runs"][0]["value"] is None
    (tmp_path / "file").write_text("")
    failed = coneheads(*FLAGS, "--out=file/cmp", cwd=tmp_path)
    assert failed.returncode == 1
    assert "--out: cannot write to 'file/cmp'" in failed.stderr


def test_a_worker_that_is_killed_is_told_of(tmp_path):
    process = subprocess.Popen(
        command(*FLAGS, "--train.steps=5000", "--jobs=1", "-q"), cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("cmp/runs/*/checkpoints/index.json")):
        time.sleep(0.05)
        assert process.poll() is None
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended with code -9" in complaint


def test_without_arguments_it_is_four_scores_at_three_sizes_with_three_seeds_at_least():
    from coneheads.lab import cli

    config = cli.parse("compare", [])
    assert set(config.scores) == {"dot", "laplacian", "penumbral", "umbral"}
    assert len(config.sizes) == 3
    assert len(config.seeds) >= 3
    assert len(compare.plan(config, compare.Path("x"))) == 12 * len(config.seeds)
