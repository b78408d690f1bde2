"""Two processes under torchrun give what one process gives with the same batch, to rounding, and end in peace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = [
    "train", "--task.branching=3", "--task.depth=3", "--task.set_size=6", "--task.values=4", "--task.examples=101",
    "--model.qk_dim=3", "--model.heads=1", "--model.width=16", "--train.batch=33", "--train.steps=30",
    "--train.eval_every=10", "--threads=1", "-q",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# Trains as the command does, and writes down the threads there are when the record is written and after the command.
THREADS = """
from pathlib import Path
from coneheads.lab import cli, train

def note_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    with open("threads.txt", "a") as file:
        print(*names, file=file)

train.resolve = lambda model, resolve=train.resolve: (note_threads(), resolve(model))[1]
assert cli.main() == 0
note_threads()
"""


def train(folder, *launcher, out, program=("-m", "coneheads")):
    done = subprocess.run(
        [*launcher, *program, *FLAGS, f"--out={out}"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / out / "run.json").read_text())


def test_two_processes_give_the_numbers_of_one(tmp_path):
    one = train(tmp_path, sys.executable, out="one")
    two = train(tmp_path, *TORCHRUN, "--nproc-per-node=2", out="two")
    assert (one["processes"], two["processes"]) == (1, 2)
    for split, metrics in one["metrics"].items():
        assert two["metrics"][split] == pytest.approx(metrics, rel=1e-4)
    curves = [
        [json.loads(line)["loss"] for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("one", "two")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in /proc on Linux alone")
def test_no_thread_of_the_group_is_left_when_the_command_ends(tmp_path):
    """One that is would abort the process now and then, when the interpreter ends."""
    (tmp_path / "program.py").write_text(THREADS)
    train(tmp_path, *TORCHRUN, "--nproc-per-node=1", out="run", program=["program.py"])
    during, after = (tmp_path / "threads.txt").read_text().splitlines()
    assert "gloo" in during
    assert "gloo" not in after
