"""Contract 1: at most twice the error of plain PyTorch."""

import dataclasses
import functools
import os

import pytest
import torch
import triton
from triton import language as tl

import coneheads
from coneheads.backends.inputs import Inputs, prepare
from coneheads.backends.triton import tiles
from coneheads.scores import resolve
from tests import plain
from tests.backends.interpreted.common import (
    check_near,
    every_dtype,
    every_score,
    float32_and_half,
    without_warnings_of_numpy,
)
from tests.cases import SCORE_NAMES, Shape, masks
from tests.test_accuracy import check_twice_the_error_of_plain, run

pytestmark = without_warnings_of_numpy


EMULATED = "EMULATED_ARCH" in os.environ
ONE = {"batch": 1, "heads": 1, "kv_heads": 1}
SHAPES = [
    Shape("plain", **ONE),
    Shape("one_query", **ONE, length=1),
    Shape("one_key", **ONE, keys=1),
    Shape("square", batch=2, heads=1, kv_heads=1, length=13, keys=13),
    Shape("several_tiles", **ONE, length=17, keys=20, size=12),
    Shape("size_2", **ONE, size=2),
    Shape("size_65", **ONE, size=65, value_size=33),
    Shape("grouped_queries", batch=1, heads=2, kv_heads=1, length=3),
    Shape("transposed", batch=1, layout="transposed"),
    Shape("strided", **ONE, layout="strided"),
    Shape("empty_batch", batch=0),
]


# What lies how in memory does not depend on the dtype: half precision leaves it out.
ONLY_SINGLE = ("one_query", "square", "transposed", "strided", "empty_batch")
PARTS = ("out", "dq", "dk", "dv")


def relative_errors(name, tensors, arguments):
    """Of our results and of those of plain PyTorch, each relative to the largest entry of the truth."""
    score, dtype = resolve(name), tensors[0].dtype
    weight = torch.randn(*tensors[0].shape[:3], tensors[2].shape[-1])

    def ordinary(*leaves):
        return plain.attention(*leaves, arguments.get("attn_mask"), arguments.get("is_causal", False), score)

    def ours(*leaves, backend):
        return coneheads.attention(*leaves, score=score, backend=backend, **arguments)

    truth = run(functools.partial(ours, backend="reference"), tensors, weight, torch.float64)
    scales = [t.abs().amax().item() if t.numel() else 0.0 for t in truth]
    return [
        torch.tensor(
            [
                (g - t).abs().amax().item() / (scale or 1.0) if t.numel() else 0.0
                for g, t, scale in zip(got, truth, scales, strict=True)
            ]
        )
        for got in (
            run(functools.partial(ours, backend="triton"), tensors, weight, dtype),
            run(ordinary, tensors, weight, dtype),
        )
    ]


@every_dtype
@every_score
def test_error_is_at_most_twice_that_of_plain_pytorch(name, dtype):
    """In the mean over shapes and masks: one draw is a matter of luck. In some score every mask meets every shape."""
    found = []
    for number, shape in enumerate(SHAPES):
        if dtype != torch.float32 and shape.name in ONLY_SINGLE:
            continue
        kinds = list(masks(shape).values())
        for i in range(2 if dtype == torch.float32 and name == "umbral" else 1):
            mask = kinds[(number + SCORE_NAMES.index(name) + 3 * i) % len(kinds)]
            found.append(relative_errors(name, shape.tensors(dtype), {**mask, "enable_gqa": shape.gqa}))
    ours, ordinary = (torch.stack(errors) for errors in zip(*found, strict=True))
    assert ours.isfinite().all()
    usable = ordinary.isfinite().all(-1)  # plain PyTorch may overflow in float16
    limit = 2 * ordinary[usable].mean(0) + torch.finfo(dtype).eps
    for part, error, allowed in zip(PARTS, ours[usable].mean(0), limit, strict=True):
        assert error <= allowed, f"{part}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.name == "one_key"], ids=str)
@float32_and_half
@every_score
def test_one_key_has_weight_1_and_its_score_no_gradient(name, dtype, shape):
    query, key, value = (t.requires_grad_() for t in shape.tensors(dtype))
    out = coneheads.attention(query, key, value, score=name, backend="triton")
    assert torch.equal(out, value.expand_as(out))
    grads = torch.autograd.grad(out, (query, key), torch.randn_like(out))
    assert all((grad == 0).all() for grad in grads)


@every_score
def test_queries_equal_to_keys_cost_no_accuracy(name):
    draws = []
    for _ in range(4 if name == "umbral" else 2):
        query, value = torch.randn(1, 1, 15, 16), torch.randn(1, 1, 15, 5)
        draws.append(((query, query.clone(), value), {}))
    check_twice_the_error_of_plain(draws, name, ["triton"], EMULATED)


def share_of_kinds(score, query, key):
    """Of all pairs: ancestors and descendants, those with a common ancestor that is neither, and those without one."""
    (q, q_level, k, k_level), *_ = prepare(Inputs(query, key, key, None, False, 0.0, None, score))
    distance = (q[..., :, None, :] - k[..., None, :, :]).norm(dim=-1)
    ancestors = distance < (q_level[..., :, None] - k_level[..., None, :]).abs()
    lca = torch.maximum(q_level[..., :, None], k_level[..., None, :])
    lca = torch.maximum(lca, (q_level[..., :, None] + k_level[..., None, :] + distance) / 2)
    beyond = lca > getattr(score, "light_height", torch.inf)
    return [kind.float().mean().item() for kind in (ancestors, ~ancestors & ~beyond, beyond)]


@every_dtype
@pytest.mark.parametrize(
    "name", [name + readout for name in ("penumbral", "umbral") for readout in ("", "-height_sq", "-distance")]
)
def test_pairs_of_all_kinds_at_once(name, dtype):
    """Slopes of ancestors, of pairs with a common ancestor and of those without one are added up in one sum."""
    cone, _, readout = name.partition("-")
    score = resolve(cone)
    # Umbral heights reach 1e3 here. Where their squares are scores, one draw would decide what the mean is.
    gamma = 1e-3 if name == "umbral-height_sq" else 2.0
    score = dataclasses.replace(score, readout=readout or "height", gamma=gamma)
    draws, found = [], []
    for _ in range(4):
        query, key = torch.randn(1, 1, 15, 16), torch.randn(1, 1, 20, 16)
        for tokens in (query, key):  # some far from all others, some below them
            tokens[..., :-1] *= 0.01 if cone == "umbral" else 0.1
            tokens[:, :, ::3, :-1] *= 6
            tokens[..., -1] *= 2
        found.append(share_of_kinds(score, query, key))
        draws.append(([t.to(dtype) for t in (query, key, torch.randn(1, 1, 20, 5))], {}))
    ancestors, below, beyond = torch.tensor(found).mean(0)
    assert min(ancestors, below) > 0.1
    assert beyond > (0.02 if cone == "penumbral" else -1)
    check_twice_the_error_of_plain(draws, score, ["triton"], EMULATED)


@every_dtype
@pytest.mark.parametrize("readout", ["height", "height_sq"])
def test_large_scores_of_pairs_without_a_common_ancestor(readout, dtype):
    """Their digits are those of weights: in float32 all kernels find the same score, from whichever end they come."""
    score = coneheads.Penumbral(gamma=8.0, readout=readout)
    draws = []
    for _ in range(6):
        query, key = 3 * torch.randn(1, 1, 15, 16), 3 * torch.randn(1, 1, 20, 16)
        *_, beyond = share_of_kinds(score, query, key)
        assert beyond > 0.5
        draws.append(([t.to(dtype) for t in (query, key, torch.randn(1, 1, 20, 5))], {}))
    check_twice_the_error_of_plain(draws, score, ["triton"], EMULATED)


@every_dtype
@pytest.mark.parametrize("light_height", [0.7, 3.1])
def test_points_at_the_light_cost_no_accuracy(light_height, dtype):
    """Their level is h but for a rounding, which must not count as a pair without a common ancestor."""
    query, key = 1e-3 * torch.randn(1, 1, 30, 16), 1e-3 * torch.randn(1, 1, 60, 16)
    query[..., -1], key[..., -1] = torch.linspace(10, 40, 30), torch.linspace(-6, 40, 60)
    tensors, weight = [t.to(dtype) for t in (query, key, torch.randn(1, 1, 60, 5))], torch.randn(1, 1, 30, 5).to(dtype)
    attention = functools.partial(coneheads.attention, score=coneheads.Penumbral(light_height=light_height, gamma=3.0))
    truth = run(functools.partial(attention, backend="reference"), tensors, weight, torch.float64)
    got = run(functools.partial(attention, backend="triton"), tensors, weight, dtype)
    check_near(got, truth, 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps, list(PARTS))


@every_score
def test_near_pairs_cost_no_accuracy(name):
    draws = []
    for gap in (1e-2, 1e-4, 1e-6) * (2 if name == "umbral" else 1):
        key, value = torch.randn(1, 1, 15, 16), torch.randn(1, 1, 15, 5)
        draws.append(((key + gap * torch.randn_like(key), key, value), {}))
    check_twice_the_error_of_plain(draws, name, ["triton"], EMULATED)


@every_score
def test_keys_that_share_an_offset_of_1000_cost_no_accuracy(name):
    offset = torch.full((16,), 1000.0)
    if name != "laplacian":
        offset[-1] = 0  # a height would saturate
    draws = []
    for _ in range(4 if name == "umbral" else 2):
        tensors = torch.randn(1, 1, 15, 16) + offset, torch.randn(1, 1, 16, 16) + offset, torch.randn(1, 1, 16, 5)
        draws.append((tensors, {}))
    check_twice_the_error_of_plain(draws, name, ["triton"], EMULATED)


@pytest.mark.parametrize("name", ["penumbral", "umbral", "dot"])
@every_dtype
def test_largest_sizes_cost_no_accuracy(name, dtype):
    """200 is padded to 256, the largest, where there is nothing to pad."""
    draws = []
    for size, value_size in ((200, 256), (256, 200)) * (4 if dtype == torch.float32 else 1):
        tensors = [torch.randn(1, 1, n, e).to(dtype) for n, e in ((3, size), (18, size), (18, value_size))]
        draws.append((tensors, {}))
    check_twice_the_error_of_plain(draws, name, ["triton"], EMULATED and dtype == torch.float32)


# --- What all keys of a query share ----------------------------------------------------------------------------------


def mean_errors(draws):
    """Of the umbral cone, ours and those of plain PyTorch, [4]: in the order of PARTS."""
    errors = zip(*(relative_errors("umbral", tensors, {}) for tensors in draws), strict=True)
    return [torch.stack(found).mean(0) for found in errors]


@pytest.mark.parametrize(("kind", "size"), [("large features", 64), ("high queries", 64), ("high queries", 5)])
def test_umbral_scores_do_not_drown_in_what_all_keys_share(kind, size):
    """It is e^24 here, at most, and plain PyTorch is off by as much as single precision rounds it."""
    draws = []
    for _ in range(3):
        query, key = torch.randn(1, 1, 18, size), torch.randn(1, 1, 20, size)
        if kind == "large features":
            query, key = 8 * query, 8 * key
        else:
            query[..., -1] += 6
        draws.append((query, key, torch.randn(1, 1, 20, 5)))
    ours, ordinary = mean_errors(draws)
    for part, error, other in zip(PARTS, ours, ordinary, strict=True):
        # A query's own gradient is the difference of directions that are almost the same, as in plain PyTorch.
        allowed = 3 * other if part == "dq" else other / 20
        assert error <= allowed, f"{part}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("size", [5, 16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gap", [0.1, 0.01])
def test_clusters_of_tokens_cost_umbral_scores_no_accuracy(gap, size):
    """Between the tokens of one, distances are small beside what is left out of a query's scores."""
    draws = []
    for _ in range(4):
        centres = torch.randn(4, size)
        query, key = (
            (centres[torch.arange(n) % 4] + gap * torch.randn(n, size)).unflatten(0, (1, 1, n)) for n in (18, 20)
        )
        draws.append((query, key, torch.randn(1, 1, 20, 5)))
    ours, ordinary = mean_errors(draws)
    for part, error, other in zip(PARTS, ours, ordinary, strict=True):
        assert error <= 2 * other, f"{part}: error {error:.2e}, allowed {2 * other:.2e}"


@pytest.mark.parametrize("features", [0.03, 0.3, 3.0])
@pytest.mark.parametrize("size", [5, 16])
def test_descendants_of_a_query_have_equal_weights(features, size):
    """Whether they are near to it or not: the height of their common ancestor is its own, to the last bit."""
    score = coneheads.Umbral(gamma=100.0)
    query = features * torch.nn.functional.normalize(torch.randn(1, 1, 6, size), dim=-1)
    query[..., -1] = 3
    position, level = score.points(query)
    way = torch.nn.functional.normalize(torch.randn(1, 1, 20, size - 1), dim=-1)
    place = position[:, :, :1] + way * torch.linspace(0, 0.9, 20)[:, None] * level[0, 0, 0]
    key = torch.cat([place / torch.tensor(-5.0).exp(), torch.full((1, 1, 20, 1), -5.0)], -1)
    value = torch.randn(1, 1, 20, 5)
    out = coneheads.attention(query[:, :, :1], key, value, score=score, backend="triton")
    torch.testing.assert_close(out, value.mean(2, keepdim=True))


@triton.jit
def cut_off(X, Y, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(Y + places, tiles.round_gradients(tl.load(X + places), "tf32", True))


@pytest.mark.skipif(EMULATED, reason="it starts a kernel of its own")
def test_numbers_that_are_cut_off_to_tf32():
    """NaN stays NaN, that of a GPU too, whose bits are all 1. CUT_OFF gives back what the rest lose in the mean."""
    x = torch.randn(1 << 14)
    x[0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    x[1] = torch.inf
    y = torch.empty_like(x)
    cut_off[(1,)](x, y, len(x))
    assert y[0].isnan()
    assert y[1] == torch.inf
    x, y = x[2:], y[2:]
    assert (y.view(torch.int32) & 0x1FFF == 0).all()
    assert (y.abs() <= x.abs()).all()
    assert (y / x).mean() < 1 - 3e-4
    assert abs((y * tiles.CUT_OFF.value / x).mean() - 1) < 1e-5


@pytest.mark.parametrize("name", ["dot", "laplacian", "penumbral", "umbral"])
def test_gradients_in_float16_are_not_too_small_in_the_mean(name):
    """Those of queries and keys are cut off to tf32, by up to 1e-3."""
    tensors = [torch.randn(1, 1, n, size).half() for n, size in ((20, 16), (40, 16), (40, 3))]
    grads = []
    for dtype, backend in ((torch.float16, "triton"), (torch.float64, "reference")):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = coneheads.attention(*leaves, score=name, backend=backend)
        grads.append(torch.autograd.grad(out.double().square().sum(), leaves[:2]))
    for ours, exact in zip(*grads, strict=True):
        assert abs((ours * exact).sum() / exact.square().sum() - 1) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_query_of_each_grouped_head_is_not_moved_by_the_others(dtype):
    """As in decoding. The mean of one that is far off and one that is not would be far off from both."""
    errors = []
    for _ in range(8):
        query, key, value = (torch.randn(1, n, length, 17) for n, length in ((2, 1), (1, 20), (1, 20)))
        query[:, 1] = query[:, 0].sign() * query[:, 1].abs()
        query[:, 1, :, -1] += 7
        tensors = [t.to(dtype) for t in (query, key, value)]
        exact = coneheads.attention(
            *(t.double() for t in tensors), score="half_space", enable_gqa=True, backend="reference"
        )
        ours = coneheads.attention(*tensors, score="half_space", enable_gqa=True, backend="triton")
        errors.append((ours.double() - exact).abs().amax() / exact.abs().amax())
    assert max(errors) < 4 * torch.finfo(dtype).eps
