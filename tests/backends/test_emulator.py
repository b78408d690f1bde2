"""The emulated GPU: it computes what kernels say, and finds what is wrong with them."""

import importlib.util
import re

import numpy as np
import pytest
import torch

import coneheads
from coneheads.backends import triton as backend

if importlib.util.find_spec("triton") is None or backend.interpreted():
    pytest.skip("it runs what triton compiles", allow_module_level=True)

import triton
from triton import language as tl

from tests.backends.emulated import arithmetic, formats
from tests.backends.emulated.kernels import Emulated, on
from tests.backends.emulated.memory import Fault

every_arch = pytest.mark.parametrize("arch", [80, 90, 100])


def start(kernel, arch, *arguments, programs=1, **named):
    Emulated(kernel, arch)[lambda named: (programs,)](*arguments, **named, num_warps=4)


# --- What it computes ------------------------------------------------------------------------------------------------


@triton.jit
def add(X, Y, OUT, count, N: tl.constexpr):
    places = tl.program_id(0) * N + tl.arange(0, N)
    inside = places < count
    x = tl.load(X + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + places, x + tl.load(Y + places, mask=inside, other=0.0), mask=inside)


@every_arch
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_of_several_programs(arch, dtype):
    x, y, out = torch.randn(300).to(dtype), torch.randn(300), torch.zeros(300)
    start(add, arch, x, y, out, 300, programs=3, N=128)
    assert torch.equal(out, x.float() + y)


@triton.jit
def multiply(A, B, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(A + m[:, None] * K + k[None, :]), tl.load(B + n[:, None] * K + k[None, :])
    total = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    tl.store(OUT + m[:, None] * N + n[None, :], total)


@every_arch
@pytest.mark.parametrize("sizes", [(16, 16, 16), (64, 32, 64), (128, 64, 32)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")],
    ids=str,
)
def test_products_of_matrices(arch, sizes, dtype, precision):
    m, n, k = sizes
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.zeros(m, n)
    start(multiply, arch, a, b, out, M=m, N=n, K=k, PRECISION=precision)
    if precision == "tf32":
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    truth = a.double() @ b.double().T
    assert (out - truth).abs().max() < 4e-6 * truth.abs().max()
    assert precision != "tf32" or (out - truth).abs().max() < 1e-5  # of numbers that are cut off, not rounded


@triton.jit
def rows(X, LARGEST, TOTAL, POWERS, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(X + m[:, None] * N + n[None, :])
    tl.store(LARGEST + m, tl.max(x, 1))
    tl.store(TOTAL + m, tl.sum(x, 1))
    tl.store(POWERS + m[:, None] * N + n[None, :], tl.exp2(x))


@every_arch
def test_reductions_and_approximate_powers(arch):
    x = torch.randn(32, 64)
    largest, total, powers = torch.zeros(32), torch.zeros(32), torch.zeros(32, 64)
    start(rows, arch, x, largest, total, powers, M=32, N=64)
    assert torch.equal(largest, x.amax(1))
    torch.testing.assert_close(total, x.sum(1))
    off = (powers.double() / x.double().exp2() - 1).abs()
    assert 2.0**-24 < off.max() < 2.0**-21.5


@triton.jit
def with_another_comparison(X, Y, EITHER, BOTH, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(X + n), tl.load(Y + n)
    either, both = tl.inline_asm_elementwise(
        "{ .reg .pred first, second; setp.gt.f32 first, $2, $3; setp.gt.or.f32 second, $3, 0f3F800000, first; "
        "selp.f32 $0, $2, 0f00000000, second; setp.gt.and.f32 second, $3, 0f3F800000, first; "
        "selp.f32 $1, $2, 0f00000000, second; }",
        "=&f,=&f,f,f", [x, y], (tl.float32, tl.float32), True, 1,
    )  # fmt: skip
    tl.store(EITHER + n, either)
    tl.store(BOTH + n, both)


@every_arch
def test_comparisons_that_are_combined_with_another(arch):
    x, y = 2 * torch.randn(2, 256)
    y[::5] = torch.nan
    either, both = torch.zeros(2, 256)
    start(with_another_comparison, arch, x, y, either, both, N=256)
    assert torch.equal(either, x.where((x > y) | (y > 1), 0))
    assert torch.equal(both, x.where((x > y) & (y > 1), 0))
    assert 0 < (both != 0).sum() < (either != 0).sum() < 256


def test_bfloat16_is_rounded_as_torch_rounds_it():
    x = torch.cat([torch.randn(4096), torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38])])
    ties = (x.view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)[:4096]
    for numbers in (x, ties):
        bits = formats.to_bfloat16(numbers.numpy())
        torch.testing.assert_close(
            torch.from_numpy(formats.from_bfloat16(bits)), numbers.bfloat16().float(), rtol=0, atol=0, equal_nan=True
        )


def test_exact_results_of_approximate_functions_stay_exact():
    x = np.arange(-5, 5, dtype=np.float32)
    np.testing.assert_array_equal(arithmetic.FUNCTIONS["ex2"](x), 2.0**x)


# --- What it finds ---------------------------------------------------------------------------------------------------


@triton.jit
def fill(OUT, N: tl.constexpr):
    tl.store(OUT + tl.arange(0, N), 1.0)


@triton.jit
def sign(OUT):
    tl.store(OUT, tl.program_id(0))


@triton.jit
def read_of_the_other(OUT):
    tl.store(OUT + tl.program_id(0), tl.load(OUT + 1 - tl.program_id(0)) + 1)


@pytest.mark.parametrize(
    ("kernel", "count", "programs", "named", "what"),
    [
        (fill, 100, 1, {"N": 128}, "an address is in no tensor"),
        (sign, 1, 2, {}, "two threads write different numbers|a program writes what another has written"),
        (read_of_the_other, 2, 2, {}, "a program (reads what another has written|writes what another has read)"),
    ],
    ids=["beyond the end", "two writers", "a reader and a writer"],
)
def test_accesses_that_are_wrong(kernel, count, programs, named, what):
    with pytest.raises(Fault, match=what):
        start(kernel, 80, torch.zeros(count), programs=programs, **named)


def attend():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 64).bfloat16().requires_grad_() for n in (40, 150, 150))
    out = coneheads.attention(query, key, value, score="umbral", backend="triton")
    torch.autograd.grad(out.float().square().sum(), (query, key, value))


def without(pattern, instead=""):
    """Changes all instructions of a kind in a program, which must have some."""

    def change(ptx):
        changed, count = re.subn(rf"^.*\b{pattern}.*;\s*$", instead, ptx, flags=re.MULTILINE)
        assert count, f"there is no {pattern}"
        return changed

    return change


@every_arch
def test_kernels_without_a_fault(arch):
    with on(arch) as kernels:
        attend()
    assert {name: len(kernel.ran) for name, kernel in kernels.items()} == {
        "forward": 1, "rows": 0, "queries": 1, "keys": 1, "mask": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "change", "what"),
    [
        (80, without(r"bar\.sync"), "since the last barrier"),
        (80, without(r"cp\.async\.wait_group"), "a copy is still under way"),
        (90, without(r"wgmma\.wait_group"), "from which a product is still read"),
        (100, without(r"mbarrier\.try_wait", "setp.eq.u32 complete, 0, 0;"), "while a product is under way"),
    ],
    ids=["no barriers", "no wait for copies", "no wait for products of four warps", "no wait for tensor memory"],
)
def test_kernels_that_do_not_wait_are_found_out(arch, change, what):
    with on(arch, change), pytest.raises(Fault, match=what):
        attend()
