"""DDP and FSDP2: two processes train a converted encoder, with a learned gamma, as one process does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.nn import programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of one launch of two processes, which does all there is to check."""
    folder = tmp_path_factory.mktemp("distributed")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.nn.programs", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "done.json").read_text()) == {"world": 2, "launcher": True}
    return folder


@pytest.mark.parametrize(
    ("name", "heads", "shares"),
    [
        ("ddp", programs.HEADS, None),
        ("fsdp", programs.HEADS, [2, 1]),  # an uneven share of log_gamma [heads] for each process
        ("fsdp_one_head", 1, [1, 0]),  # fewer heads than processes: one holds nothing of it
    ],
)
def test_two_processes_learn_what_one_does(folder, name, heads, shares):
    found = torch.load(folder / f"{name}.pt")
    model = programs.encoder(heads)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    assert found["losses"] == pytest.approx(programs.train(model), rel=1e-5)
    assert found.get("shares") == shares
    learned = model.state_dict()
    for key, value in learned.items():
        torch.testing.assert_close(found["state"][key], value, rtol=1e-5, atol=1e-5)
        if "log_gamma" in key:
            assert (value - start[key]).abs().min() > 1e-4  # far from where it started

    loaded = programs.encoder(heads)
    loaded.load_state_dict(found["state"])  # strictly, into the model without wrappers
    x, padding, _ = next(programs.batches())
    torch.testing.assert_close(loaded(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))
