"""The Triton kernels as they are compiled for GPUs, with the blocks and tensor cores of each, on the emulated one.

The interpreter runs kernels as they are written; here is what the compiler made of them: sums that it orders and fuses
in its own way, approximate functions, instructions in PTX, tensor cores, copies and barriers. A race or an access that
is wrong is a fault, so that every test here is one for these too.
"""

import importlib.util
import itertools

import pytest
import torch

import coneheads
from coneheads.backends import triton as backend
from coneheads.lab.gpu_compile import DTYPES, SCORES
from coneheads.scores import resolve
from tests.backends.interpreted.common import HALVES, attend, check_near, check_parity, leaves
from tests.test_accuracy import check_twice_the_error_of_plain

if importlib.util.find_spec("triton") is None or backend.interpreted():
    pytest.skip("it runs what triton compiles", allow_module_level=True)

from tests.backends.emulated.kernels import Before, on

ARCHS = (80, 90, 100)
MAIN = ("penumbral", "umbral")
OTHERS = [name for name in SCORES if name not in MAIN]
every_arch = pytest.mark.parametrize("arch", ARCHS)


def in_turn(*kinds):
    """Each combination on one architecture in turn, and on the others in `make slow`."""
    return [
        pytest.param(*(one for _, one in case), marks=[] if sum(i for i, _ in case) % 3 == 0 else pytest.mark.slow)
        for case in itertools.product(*(enumerate(kind) for kind in (ARCHS, *kinds)))
    ]


def each_once(names):
    """Each score on some architecture in some dtype, and in all others in `make slow`."""
    return [
        pytest.param(arch, name, dtype, marks=[] if j == i % 3 and k == (i // 3 + i) % 3 else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, arch in enumerate(ARCHS)
        for k, dtype in enumerate(DTYPES)
    ]


# What tensor cores each has: the beginning of an instruction.
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.mark.parametrize(("arch", "name", "dtype"), [*in_turn(MAIN, DTYPES), *each_once(OTHERS)])
def test_error_is_at_most_twice_that_of_plain_pytorch(arch, name, dtype):
    """Or a little more in float32, where a GPU's functions are approximate. Tiles are not full here."""
    draws = []
    for length, keys, size, value_size in ((40, 70, 64, 64), (50, 33, 64, 48)):
        shapes = ((1, 1, length, size), (1, 1, keys, size), (1, 1, keys, value_size))
        draws.append(([torch.randn(shape).to(DTYPES[dtype]) for shape in shapes], {}))
    with on(arch) as kernels:
        check_twice_the_error_of_plain(draws, SCORES[name], ["triton"], approximate=dtype == "float32")
    if dtype == "bfloat16":
        assert any(name.startswith(TENSOR_CORES[arch]) for name in kernels["forward"].instructions())


@pytest.mark.slow
@every_arch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dot", *MAIN])
def test_every_block_that_is_tried_gives_the_same(arch, name, dtype):
    tensors = leaves((1, 1, 150, 64), (1, 1, 140, 64), (1, 1, 140, 64), dtype=DTYPES[dtype])
    results = []
    for block in range(4):
        with on(arch, block=block):
            out = attend(*tensors, score=name)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)])
    for other in results[1:]:
        check_near(other, results[0], (256 if dtype == "float32" else 16) * torch.finfo(DTYPES[dtype]).eps)


@pytest.mark.parametrize(("arch", "name"), in_turn(["penumbral", "umbral", "half_space"]))
def test_masks_grouped_queries_and_gradients_of_everything(arch, name):
    score = resolve(name).for_size(20)
    parameters = {field: (value or 0.2) * (0.5 + torch.rand(2)) for field, value in score.parameters().items()}
    with on(arch):
        check_parity(score, (2, 2, 1, 37, 45, 20, 12), parameters, torch.randn(37, 45))
        check_parity(score, (1, 1, 1, 70, 90, 20, 12), is_causal=True)


@pytest.mark.parametrize(("arch", "name", "dtype"), in_turn(MAIN, HALVES))
def test_learned_parameters_in_half_precision(arch, name, dtype):
    """Which are not scaled by gamma then."""
    tensors = leaves((1, 2, 40, 64), (1, 1, 90, 64), (1, 1, 90, 32), dtype=dtype)
    results = []
    for where, kind in (("triton", dtype), ("reference", torch.float64)):
        parameters = {
            field: torch.full((2, 1, 1), value, dtype=torch.float64, requires_grad=True)
            for field, value in resolve(name).for_size(64).parameters().items()
        }
        copies = [t.detach().to(kind).requires_grad_() for t in tensors]
        with on(arch):
            out = attend(
                *copies, score=resolve(name).with_parameters(parameters), backend=where, enable_gqa=True, is_causal=True
            )
            wanted = [*copies, *parameters.values()]
            results.append([out.detach(), *torch.autograd.grad(out.double().square().sum(), wanted)])
    check_near(*results, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("arch", [*(pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS[:2]), ARCHS[2]])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float16, torch.float32], ids=str)
def test_float32_is_never_multiplied_as_tf32(arch, kind):
    """Where weights depend on a mask with entries of less than 32 bits, the compiler would, for sm_100."""
    query, key, value = leaves((1, 1, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))
    mask = None if kind is None else torch.randn(70, 70) > -1 if kind is torch.bool else torch.randn(70, 70).to(kind)
    with on(arch) as kernels:
        out = attend(query, key, value, mask)
        torch.autograd.grad(out.square().sum(), (query, key, value))
    check_near([out], [attend(*(t.double() for t in (query, key, value)), mask, backend="reference")], 2e-6)
    for kernel in kernels.values():
        assert not [name for name in kernel.instructions() if name.startswith(tuple(TENSOR_CORES.values()))]


@pytest.mark.parametrize(("arch", "name"), in_turn(["dot", "laplacian", "penumbral", "umbral", "hyperboloid"]))
def test_one_key_has_weight_1_and_its_score_no_gradient(arch, name):
    """Nor has a mask: what cancels is rounded alike in all kernels, whatever the compiler fuses."""
    query, key, value, mask = leaves((1, 1, 20, 16), (1, 1, 1, 16), (1, 1, 1, 7), (20, 1))
    with on(arch):
        out = attend(query, key, value, mask, score=name)
        grads = torch.autograd.grad(out, (query, key, mask), torch.randn_like(out))
    assert torch.equal(out, value.expand_as(out))
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize(("arch", "name", "dtype"), in_turn(MAIN, backend.DTYPES))
def test_nan_in_masked_out_keys_never_influences_anything(arch, name, dtype):
    """A GPU's maximum of NaN and a number is the number."""
    query, key, value = leaves((1, 1, 20, 64), (1, 1, 40, 64), (1, 1, 40, 16), dtype=dtype)
    mask = torch.ones(20, 40, dtype=torch.bool)
    mask[:, [3, 33]] = mask[7] = False
    results = []
    for garbage in (0.5, torch.nan):
        copies = [t.detach().clone() for t in (query, key, value)]
        for tensor in copies[1:]:
            tensor[:, :, [3, 33]] = garbage
        with on(arch):
            out = attend(*(t.requires_grad_() for t in copies), mask, score=name)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), copies)])
    check_near(*reversed(results), 4 * torch.finfo(dtype).eps)
    assert (results[1][0][:, :, 7] == 0).all()
    assert (results[1][1][:, :, 7] == 0).all()


@every_arch
def test_dropout_is_replayed_in_backward(arch):
    """With the unit matrix as values, the output is the weights; the gradient of values is theirs as well."""
    query, key = leaves((1, 1, 40, 6), (1, 1, 18, 6))
    value, weight = torch.eye(18)[None, None].requires_grad_(), torch.randn(1, 1, 40, 18)
    mask = torch.randn(40, 18)
    with on(arch):
        out = attend(query, key, value, mask, dropout_p=0.4)
        *grads, grad_value = torch.autograd.grad(out, (query, key, value), weight)
        whole = attend(query, key, value, mask)
        expected = torch.autograd.grad((whole * (out != 0) / 0.6 * weight).sum(), (query, key))
    kept = out != 0
    assert 0.5 < kept.double().mean() < 0.7
    torch.testing.assert_close(out[kept], whole[kept] / 0.6)
    torch.testing.assert_close(grad_value, out.mT @ weight)
    check_near(grads, expected, 1e-5)


@pytest.mark.parametrize(("arch", "name", "dtype"), in_turn(MAIN, backend.DTYPES))
def test_huge_tiny_and_equal_features_give_finite_results(arch, name, dtype):
    for features in (0.0, 1e-6, 30.0, 6e4):
        tensors = [(features * torch.randn(1, 1, n, 64)).to(dtype) for n in (20, 40)]
        tensors = [t.clamp(-6e4, 6e4).requires_grad_() for t in (tensors[0], tensors[1], tensors[1].clone())]
        with on(arch):
            out = coneheads.attention(*tensors, score=name, backend="triton")
            grads = torch.autograd.grad(out.float().mean(), tensors)
        assert all(t.isfinite().all() for t in (out, *grads)), features


# --- Positions beyond 2^31 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "name", "dtype"), in_turn(["dot", "penumbral"], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("before", [Before(heads=1 << 20), Before(rows=1 << 26)], ids=["heads", "rows"])
def test_what_begins_beyond_2_31_is_found(before, arch, name, dtype):
    """Where heads or rows before have 2^31 numbers and more, 32 bits would lead elsewhere, which is a fault."""
    tensors = leaves((1, 1, 100, 64), (1, 1, 90, 64), (1, 1, 90, 64), dtype=dtype)
    results = []
    for those in (Before(), before):
        with on(arch, before=those):
            out = attend(*tensors, score=name)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)])
    for near, far in zip(*results, strict=True):
        assert torch.equal(near, far)
