"""Runs that were killed, cut short or damaged: the very numbers of an uninterrupted run, or a clear error."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from coneheads.lab import cli
from tests.lab.programs import command

FLAGS = [
    "train", "--task.branching=3", "--task.depth=3", "--task.set_size=6", "--task.values=4", "--task.examples=100",
    "--model.score=penumbral", "--model.qk_dim=3", "--model.heads=1", "--model.width=16", "--train.batch=32",
    "--train.steps=1200", "--train.eval_every=20", "--train.save_every=7", "--threads=1", "-q", "--resume",
]  # fmt: skip

# Imports once, then forks a process a line: what is killed is a whole process, and starting one is cheap.
NURSERY = """
import os, sys, torch
torch.set_num_threads(1)
from coneheads.lab import cli, train, compare
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(cli.main(line.split()))
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Nursery:
    """Starts trainings in processes of their own, and kills them when told."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, *arguments):
        self.process.stdin.write(" ".join(arguments) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def code(self):
        return int(self._line())

    def _line(self):
        """The next line that is a number; trainings print to the same stream."""
        while not (line := self.process.stdout.readline().strip()).lstrip("-").isdigit():
            assert self.process.poll() is None
        return line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def outcome(folder):
    record = json.loads((folder / "run.json").read_text())
    return record["status"], record["metrics"], record["best_step"], (folder / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run(command(*FLAGS, "--out=run"), cwd=folder, check=True, capture_output=True)
    return folder / "run"


def test_ten_kills_at_random_moments_leave_the_very_numbers_of_an_uninterrupted_run(uninterrupted, tmp_path):
    moments = random.Random(0)
    kills = 0
    with Nursery(tmp_path) as nursery:
        for _ in range(40):
            child = nursery.start(*FLAGS, "--out=run")
            if kills < 10:
                time.sleep(moments.uniform(0.02, 0.4))
                os.kill(child, signal.SIGKILL)
            code = nursery.code()
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
    assert kills == 10
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


def resume(folder, **limits):
    """In a process of its own."""
    return subprocess.run(
        command(*FLAGS, "--out=run"), cwd=folder, capture_output=True, text=True, check=False, **limits
    )


def complaint(folder, capsys):
    """What a run that cannot go on says; it ends with code 1."""
    assert cli.main([*FLAGS, f"--out={folder / 'run'}"]) == 1
    return capsys.readouterr().err


@pytest.fixture
def halfway(uninterrupted, tmp_path):
    """A copy of the run as if it had been killed after its last checkpoint but before its record."""
    shutil.copytree(uninterrupted, tmp_path / "run")
    (tmp_path / "run/run.json").unlink()
    return tmp_path


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt"])
def test_a_damaged_checkpoint_is_named_and_left_as_it_is(halfway, capsys, file):
    last = json.loads((halfway / "run/checkpoints/index.json").read_text())["last"]
    path = halfway / "run/checkpoints" / last / file
    path.write_bytes(path.read_bytes()[:100])
    said = complaint(halfway, capsys)
    assert file in said
    assert "damaged" in said
    assert path.stat().st_size == 100


def test_a_foreign_checkpoint_is_named(halfway, capsys):
    import safetensors.torch
    import torch

    last = json.loads((halfway / "run/checkpoints/index.json").read_text())["last"]
    safetensors.torch.save_file({"foreign": torch.zeros(3)}, halfway / "run/checkpoints" / last / "model.safetensors")
    said = complaint(halfway, capsys)
    assert "of another model" in said
    assert "foreign" in said


def test_a_checkpoint_with_code_in_it_is_refused(halfway, capsys, monkeypatch):
    import torch

    last = json.loads((halfway / "run/checkpoints/index.json").read_text())["last"]
    torch.save({"at": Harmful()}, halfway / "run/checkpoints" / last / "state.pt")
    monkeypatch.chdir(halfway)
    assert "damaged" in complaint(halfway, capsys)
    assert not (halfway / "harmed").exists()


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_damaged_index_and_a_damaged_config_are_named(halfway, capsys):
    (halfway / "run/checkpoints/index.json").write_text("{")
    assert "index.json is damaged" in complaint(halfway, capsys)
    (halfway / "run/config.yaml").write_text("a: [")
    assert "config.yaml is damaged" in complaint(halfway, capsys)


def test_a_full_disk_ends_the_run_with_a_sentence_and_the_last_checkpoint_goes_on(uninterrupted, tmp_path):
    def no_room():  # no file may grow beyond 6,000 bytes: logs fit, weights do not
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    done = resume(tmp_path, preexec_fn=no_room)
    assert done.returncode == 1
    assert "could not write a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [path.name for path in (tmp_path / "run/checkpoints").iterdir() if path.name != "index.json"]
    assert resume(tmp_path).returncode == 0
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "run").write_text("a file")
    assert "--out: cannot write to" in complaint(tmp_path, capsys)


def test_ctrl_c_stops_with_130_and_the_run_goes_on(uninterrupted, tmp_path):
    with Nursery(tmp_path) as nursery:
        child = nursery.start(*FLAGS, "--out=run")
        while not (tmp_path / "run/checkpoints/index.json").exists():
            time.sleep(0.01)
        os.kill(child, signal.SIGINT)
        assert nursery.code() in (130, 0)
        nursery.start(*FLAGS, "--out=run")
        assert nursery.code() == 0
    assert outcome(tmp_path / "run") == outcome(uninterrupted)
