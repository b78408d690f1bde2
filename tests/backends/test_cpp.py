"""The C++ kernels beside the reference: sizes at the edges of their tiles, masks, threads, instruction sets."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import coneheads
from coneheads.backends import BACKENDS, build, compiler, cpp
from coneheads.scores import BY_NAME

pytestmark = pytest.mark.skipif(build.why_unavailable() is not None, reason="no C++ compiler on this machine")

SCORES = {
    **{name: cls() for name, cls in BY_NAME.items()},
    **{f"penumbral {readout}": coneheads.Penumbral(readout=readout) for readout in ("height_sq", "distance")},
    "umbral height_sq": coneheads.Umbral(readout="height_sq", radius=0.5, gamma=0.01),
    "umbral distance": coneheads.Umbral(readout="distance"),
    "penumbral psi": coneheads.Penumbral(lift="psi", light_height=1.5, height_scale=0.5),
    "penumbral exp": coneheads.Penumbral(lift="exp"),
    "umbral exp": coneheads.Umbral(lift="exp", radius=0.3),
    "half_space exp": coneheads.HalfSpaceDistance(lift="exp", beta=0.5, offset=0.1),
}
# L, S, E, Ev: one more and one less than rows of a tile, panels of keys, blocks of rows and keys
EDGES = [
    (1, 1, 2, 1),
    (4, 513, 9, 15),
    (5, 16, 10, 16),
    (6, 17, 11, 17),
    (7, 31, 64, 32),
    (97, 33, 17, 33),
    (193, 511, 16, 8),
    (13, 1025, 65, 5),
    (130, 600, 3, 64),
]


def gradients(backend, tensors, dtype, weight, **arguments):
    """Output and gradients, in float64, computed in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = coneheads.attention(*leaves, backend=backend, **arguments)
    return [t.double() for t in (out, *torch.autograd.grad(out, leaves, weight.to(dtype)))]


def assert_near(got, truth, tolerance):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, truth, strict=False):
        assert a.isfinite().all(), name
        error = (a - b).abs().amax() if b.numel() else torch.zeros(())
        assert error <= tolerance * b.abs().amax().clamp_min(1e-3), f"{name}: {error:.1e} of {b.abs().amax():.1e}"


@pytest.mark.parametrize("sizes", EDGES, ids=str)
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_parity_at_the_edges_of_tiles(score, sizes, poisoned):
    length, keys, size, value_size = sizes
    tensors = [torch.randn(1, 2, n, e) for n, e in ((length, size), (keys, size), (keys, value_size))]
    weight = torch.randn(1, 2, length, value_size)
    for causal in (False, True):
        arguments = {"score": score, "is_causal": causal}
        truth = gradients("reference", tensors, torch.float64, weight, **arguments)
        assert_near(gradients("cpp", tensors, torch.float64, weight, **arguments), truth, 1e-9)
        # A score of 1000 has an error of 1e-4 in float32, whatever computes it.
        assert_near(gradients("cpp", tensors, torch.float32, weight, **arguments), truth, 5e-3)


MASKS = [(2, 4, 9, 40), (2, 1, 1, 40), (1, 4, 9, 1), (1, 1, 9, 40), (40,), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_gradient_of_masks_of_every_shape(shape, threads, poisoned):
    tensors = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 5)
    tensors = [t.double() for t in tensors]
    mask = torch.randn(shape, dtype=torch.float64).requires_grad_()
    gamma = torch.rand(4, dtype=torch.float64).requires_grad_()
    light = torch.tensor(0.8, dtype=torch.float64).requires_grad_()
    weight = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    results = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for backend in ("reference", "cpp"):
            score = coneheads.Penumbral(gamma=gamma, light_height=light)
            out = coneheads.attention(*tensors, mask, score=score, enable_gqa=True, backend=backend)
            results.append(torch.autograd.grad(out, (mask, gamma, light), weight))
    finally:
        torch.set_num_threads(before)
    for got, truth in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_threads_change_only_the_rounding_and_repeats_change_nothing(heads, causal):
    tensors = [torch.randn(1, heads, 700, 16) for _ in range(3)]
    weight = torch.randn(1, heads, 700, 16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append(gradients("cpp", tensors, torch.float32, weight, score="umbral", is_causal=causal))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(results[1], results[2], strict=True))
    for other in (results[1], results[3]):
        assert_near(other, results[0], 1e-4)


def test_rows_are_read_where_they_lie():
    """Tensors whose rows are contiguous are not copied: a call allocates its results and little more."""
    base = torch.randn(2, 300, 4, 3, 32)  # [B, L, H, 3, E], as one projection makes it
    query, key, value = base.permute(3, 0, 2, 1, 4)
    expected = coneheads.attention(query.contiguous(), key.contiguous(), value.contiguous(), backend="cpp")
    assert torch.equal(coneheads.attention(query, key, value, backend="cpp"), expected)


@pytest.mark.parametrize("name", ["umbral", "laplacian", "half_space", "hyperboloid"])
def test_gradients_of_the_scores_of_a_long_row_add_up_to_0_also_where_one_key_has_nearly_all_the_weight(name):
    torch.manual_seed(0)
    key, value = torch.randn(1, 1, 1500, 16), torch.randn(1, 1, 1500, 8)
    query = key[:, :, 10:1490:60] + 0.05 * torch.randn(1, 1, 25, 16)
    score = coneheads.Umbral() if name == "umbral" else BY_NAME[name](8.0)
    mask = torch.zeros(1, 1, 25, 1500, requires_grad=True)  # its gradients are those of the scores
    out = coneheads.attention(query, key, value, mask, score=score, backend="cpp")
    (grad,) = torch.autograd.grad(out.sum(), mask)
    assert grad.abs().max() > 0
    assert (grad.sum(-1).abs() <= 1e-3 * grad.abs().sum(-1)).all()


HALF_TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def finite_numbers(dtype, columns):
    """All of a type of 16 bits, but for a few, in rows."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = bits[bits.isfinite()]
    return numbers[: numbers.numel() // columns * columns].view(1, -1, 1, columns)


@HALF_TYPES
@pytest.mark.parametrize("columns", [8, 24])  # in vectors, and what is left after them
def test_conversions_of_half_precision(dtype, columns):
    """Every finite number of the type goes through the kernels unchanged, as the value of a single key."""
    value = finite_numbers(dtype, columns)
    query = torch.zeros(1, value.shape[1], 5, 4, dtype=dtype)
    out = coneheads.attention(query, query[:, :, :1], value, backend="cpp")
    assert torch.equal(out, value.expand_as(out))


@HALF_TYPES
def test_results_in_half_precision_are_rounded_to_the_nearest(dtype):
    value = finite_numbers(dtype, 24)
    value = torch.cat([value, value.flatten()[torch.randperm(value.numel())].view_as(value)], 2)
    query = torch.zeros(1, value.shape[1], 5, 4, dtype=dtype)
    out = coneheads.attention(query, query[:, :, :2], value, backend="cpp")  # each of two keys has half of the weight
    means = (value[:, :, :1].double() / 2 + value[:, :, 1:].double() / 2).float().to(dtype)
    assert torch.equal(out, means.expand_as(out))


def test_auto_takes_the_kernels_wherever_they_can_serve():
    assert BACKENDS[0].name == "cpp"
    query = torch.randn(1, 2, 7, 8)
    for score in SCORES.values():
        assert cpp.find_kernel(score) is not None
        assert torch.equal(
            coneheads.attention(query, query, query, score=score),
            coneheads.attention(query, query, query, score=score, backend="cpp"),
        )


def test_short_way_of_plain_calls_gives_the_numbers_of_the_long_one():
    query, key, value = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 4)
    everything = torch.ones(9, 11, dtype=torch.bool)  # a mask takes the long way
    for name in BY_NAME:
        short, lse = coneheads.attention(query, key, value, score=name, return_lse=True)
        long, long_lse = coneheads.attention(query, key, value, everything, score=name, return_lse=True)
        torch.testing.assert_close(short, long)
        torch.testing.assert_close(lse, long_lse)
        assert lse.dtype == torch.float32


PROGRAM = """
import torch, coneheads
from coneheads.backends import build
torch.manual_seed(0)
assert build.status().level == {level!r}, build.status()
for name in coneheads.scores.BY_NAME:
    for length, keys, size in ((7, 40, 9), (20, 70, 33), (1, 50, 16)):
        tensors = [torch.randn(2, 2, n, e) for n, e in ((length, size), (keys, size), (keys, 20))]
        results = []
        for backend, dtype in (("reference", torch.float64), ("cpp", torch.float64), ("cpp", torch.float32)):
            leaves = [t.to(dtype).requires_grad_() for t in tensors]
            out = coneheads.attention(*leaves, score=name, backend=backend)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for truth, double, single in zip(*results):
            scale = truth.abs().amax()
            assert (double - truth).abs().amax() <= 1e-9 * scale, name
            assert (single - truth).abs().amax() <= 5e-3 * scale, name
print("fine")
"""


@pytest.mark.parametrize("level", [level for level in compiler.levels_of_this_cpu() if level != build.status().level])
def test_other_instruction_sets_of_this_cpu(level, tmp_path):
    environment = {**os.environ, "CONEHEADS_CPU_LEVEL": level}
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM).format(level=level)]
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "fine\n", run.stderr[-2000:]


def test_without_a_compiler_attention_works_and_says_why_once(tmp_path):
    program = (
        "import torch, coneheads\n"
        "q = torch.randn(1, 2, 5, 8, requires_grad=True)\n"
        "for _ in range(3): coneheads.attention(q, q, q).sum().backward()\n"
        "print(coneheads.available_backends())\n"
        "torch.compile(lambda q: coneheads.attention(q, q, q), fullgraph=True, backend='eager')(q)\n"
        "coneheads.attention(q, q, q, backend='cpp')\n"
    )
    environment = {**os.environ, "CXX": str(tmp_path / "no-compiler"), "CONEHEADS_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "['chunked', 'reference']\n", run.stderr
    assert run.stderr.count("RuntimeWarning: coneheads: ") == 1, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: backend='cpp' cannot serve this call: ")
    assert "no-compiler" in last
    assert "Those that can: 'chunked', 'reference'" in last
