"""What `chunked` is for: faster than the dense reference from 1024 queries and keys on, forward and backward."""

import statistics
import time

import pytest
import torch

import coneheads
from tests.cases import SCORE_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_chunked_is_faster_than_the_reference_from_1024_on(name):
    tensors = [torch.randn(1, 2, 1024, 32, requires_grad=True) for _ in range(3)]

    def seconds(backend):
        start = time.perf_counter()
        out = coneheads.attention(*tensors, score=name, backend=backend)
        torch.autograd.grad(out.sum(), tensors)
        return time.perf_counter() - start

    rounds = [{backend: seconds(backend) for backend in ("chunked", "reference")} for _ in range(12)][1:]
    chunked, reference = (statistics.median(r[backend] for r in rounds) for backend in ("chunked", "reference"))
    assert chunked < reference
