"""Tensors, marks and comparisons for the tests in the interpreter."""

import pytest
import torch

import coneheads
from coneheads.backends import triton
from tests.cases import SCORE_NAMES

# What the kernels make on purpose, -inf in masked places and numbers beyond the end of a tile, NumPy warns of.
without_warnings_of_numpy = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning")
    for what in ("overflow", "underflow", "invalid value", "divide by zero")
]
every_score = pytest.mark.parametrize("name", SCORE_NAMES)
every_dtype = pytest.mark.parametrize("dtype", triton.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
HALVES = [torch.float16, torch.bfloat16]
# bfloat16 differs from float16 in rounding and range alone: where neither is at stake, `make slow` has it.
float32_and_half = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def attend(*tensors, backend="triton", **arguments):
    return coneheads.attention(*tensors, backend=backend, **arguments)


def check_near(got, truth, tolerance, names="the results"):
    """Errors are measured by the largest number of each result."""
    for name, ours, want in zip(names if isinstance(names, list) else [names] * len(got), got, truth, strict=True):
        assert ours.shape == want.shape, name
        error, scale = (ours.double() - want.double()).abs().amax(), want.double().abs().amax()
        # A gradient that is 0 is a sum that cancels.
        allowed = tolerance * max(scale, 0.01 if tolerance else 0)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}, largest number {scale:.2e}"


def check_parity(score, sizes, parameters=None, mask=None, tolerance=1e-4, **arguments):
    """Output, log-sum-exp and the gradients of everything, in float32, beside the reference in float64."""
    batch, heads, kv_heads, length, keys, size, value_size = sizes
    tensors = leaves((batch, heads, length, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, value_size))
    parameters = parameters or {}
    weight, weight_lse = torch.randn(batch, heads, length, value_size), torch.randn(batch, heads, length)
    given = [*tensors, *parameters.values(), *([] if mask is None else [mask])]
    names = ["out", "lse", "query", "key", "value", *parameters, *([] if mask is None else ["mask"])]
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        copies = [t.detach().to(dtype).requires_grad_() for t in given]  # keeps the strides of a mask
        fields = dict(zip(parameters, copies[3:], strict=False))
        out, lse = attend(
            *copies[:3], *copies[3 + len(parameters) :], backend=backend, return_lse=True,
            score=score.with_parameters(fields), enable_gqa=heads != kv_heads, **arguments,
        )  # fmt: skip
        loss = (out * weight.to(dtype)).sum() + (lse * weight_lse.to(dtype)).masked_fill(lse == -torch.inf, 0).sum()
        finite = lse.masked_fill(lse == -torch.inf, 0)
        results.append([out.detach(), finite.detach(), *torch.autograd.grad(loss, copies)])
    check_near(*results, tolerance, names)
