"""Two processes under torchrun give what one process gives with the same batch, to rounding."""

import json
import subprocess
import sys

import pytest

FLAGS = [
    "train", "--task.branching=3", "--task.depth=3", "--task.set_size=6", "--task.values=4", "--task.examples=101",
    "--model.qk_dim=3", "--model.heads=1", "--model.width=16", "--train.batch=33", "--train.steps=30",
    "--train.eval_every=10", "--threads=1", "-q",
]  # fmt: skip


def train(folder, *launcher, out):
    done = subprocess.run(
        [*launcher, "-m", "coneheads", *FLAGS, f"--out={out}"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / out / "run.json").read_text())


def test_two_processes_give_the_numbers_of_one(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    one = train(tmp_path, sys.executable, out="one")
    two = train(tmp_path, *torchrun, out="two")
    assert (one["processes"], two["processes"]) == (1, 2)
    for split, metrics in one["metrics"].items():
        assert two["metrics"][split] == pytest.approx(metrics, rel=1e-4)
    curves = [
        [json.loads(line)["loss"] for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("one", "two")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
