"""Contract 4: forward and backward of the linear backends need memory that grows linearly with L and S.

The largest tensor of a call is counted with torch's own dispatcher: nothing of size L x S may ever be made.
"""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import coneheads
from coneheads import backends
from tests.cases import BACKEND_NAMES, SCORE_NAMES

LINEAR = [b.name for b in backends.BACKENDS if b.memory.startswith("linear") and b.name in BACKEND_NAMES]


class LargestTensor(TorchDispatchMode):
    """The largest storage, in bytes, that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return out


def largest(length, name, backend, **arguments):
    tensors = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    with LargestTensor() as seen:
        out = coneheads.attention(*tensors, score=name, backend=backend, **arguments)
        out.sum().backward()
    return seen.bytes


@pytest.fixture
def _small_tiles(monkeypatch):
    monkeypatch.setattr("coneheads.backends.pairs.TILE", 1 << 12)
    monkeypatch.setattr("coneheads.backends.pairs.COLUMNS", 64)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("backend", LINEAR)
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_no_tensor_grows_faster_than_the_inputs(name, backend):
    for arguments in ({}, {"is_causal": True}, {"dropout_p": 0.1}):
        short, long = (largest(length, name, backend, **arguments) for length in (512, 1024))
        assert long <= 2 * short
        assert long < 1024 * 1024 * 4 / 4  # a quarter of one head's matrix of scores


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("backend", LINEAR)
def test_broadcast_masks_are_never_expanded(backend):
    length = 1024
    for shape in ((1, 1, 1, length), (length, 1), (1, 2, 1, length)):
        for mask in (torch.rand(shape) > 0.2, torch.randn(shape, requires_grad=True)):
            assert largest(length, "penumbral", backend, attn_mask=mask) < length * length * 4 / 4


def test_the_count_sees_the_matrix_of_the_reference():
    assert largest(256, "dot", "reference") >= 2 * 256 * 256 * 4


@pytest.mark.usefixtures("_small_tiles")
def test_many_near_pairs_need_no_more_memory(monkeypatch):
    monkeypatch.setattr("coneheads.backends.pairs.NEAR_BLOCK", 1 << 12)
    tensors = [
        torch.ones(1, 1, 512, 8).mul(3.3).requires_grad_(),
        torch.ones(1, 1, 512, 8).mul(3.3),
        torch.randn(1, 1, 512, 8),
    ]
    with LargestTensor() as seen:
        coneheads.attention(*tensors, score="laplacian", backend="chunked").sum().backward()
    assert seen.bytes < 512 * 512 * 4 / 4


PEAK = """
import resource, sys, torch, coneheads
torch.set_num_threads(1)
length, backend = int(sys.argv[1]), sys.argv[2]
tensors = [torch.randn(1, 1, length, 32, requires_grad=True) for _ in range(3)]
small = [t[:, :, :64] for t in tensors]
coneheads.attention(*small, backend=backend).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
coneheads.attention(*tensors, backend=backend).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", LINEAR)
def test_peak_memory_of_the_process_grows_linearly(backend):
    def peak(length):
        command = [sys.executable, "-c", PEAK, str(length), backend]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    short, long = peak(8192), peak(32768)
    assert long <= 4.5 * short + 64e6
    assert long < 32768 * 32768 * 4 / 8
