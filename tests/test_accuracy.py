"""Contract 1: the error of every backend against float64 is at most twice that of plain PyTorch in the same dtype."""

import functools

import pytest
import torch

import coneheads
from coneheads.scores import resolve
from tests import plain
from tests.cases import BACKEND_NAMES, DTYPE_IDS, DTYPES, SCORE_NAMES, SHAPES, masks

NAMES = ("out", "dq", "dk", "dv")


def run(attention, tensors, weight, dtype):
    """Output, and the gradients of (out * weight).sum(), in float64, of an attention computed in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]  # keeps the strides
    out = attention(*leaves)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out, leaves, weight.to(dtype))
    return [t.detach().double() for t in (out, *grads)]


def check_twice_the_error_of_plain(draws, name, backends, approximate=False):
    """Draws are (tensors, arguments of ``attention``).

    Compared are the largest errors of a draw, in their mean over draws: a single one is a matter of luck. Where
    plain PyTorch itself overflows (float16), ours must be finite. approximate: three times and eight
    roundings are allowed, for float32 on an emulated GPU, whose functions are not as good as those of the CPU.
    """
    score = resolve(name)
    plain_errors, errors = [], {backend: [] for backend in backends}
    rounding = torch.zeros(len(NAMES), dtype=torch.float64)
    for tensors, arguments in draws:
        dtype = tensors[0].dtype
        weight = torch.randn(*tensors[0].shape[:3], tensors[2].shape[-1])

        def ours(*leaves, backend, arguments=arguments):
            return coneheads.attention(*leaves, score=score, backend=backend, **arguments)

        def ordinary(*leaves, arguments=arguments):
            return plain.attention(*leaves, arguments.get("attn_mask"), arguments.get("is_causal", False), score)

        def error(attention, tensors=tensors, weight=weight, dtype=dtype):
            got = run(attention, tensors, weight, dtype)
            return torch.tensor([(g - t).abs().amax().item() for g, t in zip(got, truth, strict=True)])  # noqa: B023

        truth = run(functools.partial(ours, backend="reference"), tensors, weight, torch.float64)
        if truth[0].numel() == 0:
            for backend in backends:
                run(functools.partial(ours, backend=backend), tensors, weight, dtype)
            return
        # Whatever computes it, a result is rounded to its dtype.
        rounding += torch.finfo(dtype).eps * torch.tensor([t.abs().amax() for t in truth]) / len(draws)
        plain_errors.append(error(ordinary))
        for backend in backends:
            errors[backend].append(error(functools.partial(ours, backend=backend)))
    plain_errors = torch.stack(plain_errors)
    usable = plain_errors.isfinite().all(-1)
    times, roundings = (3, 8) if approximate else (2, 1)
    limit = times * plain_errors[usable].mean(0) + roundings * rounding
    if dtype == torch.float64:  # the truth is no better than float64: allow for its own rounding
        limit = limit + 2e4 * rounding
    for backend in backends:
        ours = torch.stack(errors[backend])
        assert ours.isfinite().all()
        for what, error, allowed in zip(NAMES, ours[usable].mean(0), limit, strict=True):
            assert error <= allowed, f"{name}, {backend}, {what}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_error_is_at_most_twice_that_of_plain_pytorch_with_every_mask(name, shape, dtype):
    draws = [(shape.tensors(dtype), {**mask, "enable_gqa": shape.gqa}) for mask in masks(shape).values()]
    check_twice_the_error_of_plain(draws, name, BACKEND_NAMES)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_keys_that_share_an_offset_of_1000_cost_no_accuracy(name):
    offset = torch.full((16,), 1000.0)
    if name != "laplacian":
        offset[-1] = 0  # a height would saturate
    draws = []
    for _ in range(8):
        query, key, value = (
            torch.randn(2, 2, 33, 16) + offset,
            torch.randn(2, 2, 40, 16) + offset,
            torch.randn(2, 2, 40, 5),
        )
        draws.append(((query, key, value), {}))
    check_twice_the_error_of_plain(draws, name, BACKEND_NAMES)


@pytest.mark.parametrize("size", [3, 64])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_queries_equal_to_keys_cost_no_accuracy(name, size):
    draws = []
    for _ in range(8):
        query, value = torch.randn(2, 2, 33, size), torch.randn(2, 2, 33, 5)
        draws.append(((query, query.clone(), value), {}))
    check_twice_the_error_of_plain(draws, name, BACKEND_NAMES)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_near_pairs_cost_no_accuracy(name, gap):
    draws = []
    for _ in range(8):
        key, value = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 5)
        draws.append(((key + gap * torch.randn_like(key), key, value), {}))
    check_twice_the_error_of_plain(draws, name, BACKEND_NAMES)


@pytest.mark.parametrize("backend", [name for name in BACKEND_NAMES if name != "reference"])
@pytest.mark.parametrize("keys", [40, 600])
@pytest.mark.parametrize("length", [1, 4, 33])
@pytest.mark.parametrize("size", [5, 16, 64])
def test_what_all_keys_share_costs_no_digits(size, length, keys, backend):
    """Queries high above their keys: umbral scores of 1e4 differ by little, and plain float32 keeps few digits."""
    errors = []
    for _ in range(8):
        tensors = [torch.randn(1, 2, n, size) / 2 for n in (length, keys, keys)]
        tensors[0][..., -1] += 6
        weight = torch.randn(1, 2, length, size)

        def ours(*leaves, backend=backend):
            return coneheads.attention(*leaves, score="umbral", backend=backend)

        truth = run(functools.partial(ours, backend="reference"), tensors, weight, torch.float64)
        for attention in (ours, lambda *leaves: plain.attention(*leaves, None, False, resolve("umbral"))):
            got = run(attention, tensors, weight, torch.float32)
            errors += [(g - t).abs().amax() / t.abs().amax() for g, t in zip(got, truth, strict=True)]
    ours, ordinary = torch.stack(errors).view(8, 2, len(NAMES)).mean(0)
    assert ordinary[0] > 1e-5  # or the case is too easy
    assert (ours < torch.tensor([1e-5, torch.inf, 1e-4, 1e-5])).all()
    # What moves a query moves all its distances alike: its gradient cancels, in one query as luck has it.
    assert length < 33 or ours[1] < 2 * ordinary[1]


@pytest.mark.parametrize("backend", [name for name in BACKEND_NAMES if name != "reference"])
@pytest.mark.parametrize("length", [3, 33])
@pytest.mark.parametrize("size", [6, 24])
def test_near_keys_among_far_ones_cost_no_digits(size, length, backend):
    """Of 1200 keys, in blocks of any size, some lie at a query: their scores are exact, and so are those of the rest,
    which count where the near ones are masked out.
    """
    query, key, value = torch.randn(1, 1, length, size), torch.randn(1, 1, 1200, size), torch.randn(1, 1, 1200, 4)
    query[..., -1] += 4
    for first in (0, 600, 1150):
        key[..., first : first + length, :] = query + 1e-3 * torch.randn_like(query)
    mask = torch.ones(length, 1200, dtype=torch.bool)
    mask[::2, :length] = mask[::2, 600 : 600 + length] = mask[::2, 1150 : 1150 + length] = False
    weight = torch.randn(1, 1, length, 4)
    for arguments in ({}, {"attn_mask": mask}):

        def ours(*leaves, backend=backend, arguments=arguments):
            return coneheads.attention(*leaves, score="umbral", backend=backend, **arguments)

        truth = run(functools.partial(ours, backend="reference"), (query, key, value), weight, torch.float64)
        got = run(ours, (query, key, value), weight, torch.float32)
        for name, g, t in zip(NAMES, got, truth, strict=True):
            assert (g - t).abs().amax() < 1e-3 * t.abs().amax(), name


@pytest.mark.parametrize("pairs_in_a_tile", [1, 97, 1500])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_tiles_of_any_size_cost_no_accuracy(name, pairs_in_a_tile, monkeypatch):
    monkeypatch.setattr("coneheads.backends.pairs.TILE", pairs_in_a_tile)
    monkeypatch.setattr("coneheads.backends.pairs.COLUMNS", 7)
    draws = []
    for _ in range(3):
        tensors = torch.randn(2, 4, 13, 9), torch.randn(2, 2, 17, 9), torch.randn(2, 2, 17, 5)
        mask = torch.randn(2, 4, 13, 17).masked_fill(torch.rand(2, 4, 13, 17) > 0.7, -torch.inf)
        draws.append((tensors, {"is_causal": True, "enable_gqa": True}))
        draws.append((tensors, {"attn_mask": mask, "enable_gqa": True}))
    check_twice_the_error_of_plain(draws, name, ["chunked"])


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_lse_is_the_logarithm_of_the_sum_of_exponentials(name):
    query, key, value = SHAPES[0].tensors(torch.float64)
    scores = coneheads.attention_scores(query, key, score=name)
    for backend in BACKEND_NAMES:
        out, lse = coneheads.attention(query, key, value, score=name, backend=backend, return_lse=True)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        torch.testing.assert_close(out, (scores - lse[..., None]).exp() @ value)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_attention_weights_times_value_is_attention(name):
    for shape in SHAPES:
        query, key, value = shape.tensors(torch.float64)
        for mask in masks(shape).values():
            weights = coneheads.attention_weights(query, key, **mask, score=name, enable_gqa=shape.gqa)
            out = coneheads.attention(query, key, value, **mask, score=name, enable_gqa=shape.gqa)
            repeated = value.repeat_interleave(shape.heads // shape.kv_heads, 1)
            torch.testing.assert_close(weights @ repeated, out)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("light_height", [0.7, 1.0, 3.1])
def test_points_at_the_light_cost_no_accuracy(light_height, backend):
    """Their level is h but for a rounding, which must not count as a pair without a common ancestor.

    (Plain PyTorch has no gradient there.)
    """
    query, key = 1e-3 * torch.randn(1, 1, 100, 16), 1e-3 * torch.randn(1, 1, 200, 16)
    query[..., -1], key[..., -1] = torch.linspace(10, 40, 100), torch.linspace(-6, 40, 200)
    tensors, weight = (query, key, torch.randn(1, 1, 200, 5)), torch.randn(1, 1, 100, 5)
    attention = functools.partial(coneheads.attention, score=coneheads.Penumbral(light_height=light_height, gamma=3.0))
    truth = run(functools.partial(attention, backend="reference"), tensors, weight, torch.float64)
    got = run(functools.partial(attention, backend=backend), tensors, weight, torch.float32)
    for name, a, b in zip(NAMES, got, truth, strict=True):
        error = ((a - b).abs().amax() / b.abs().amax()).item()
        assert error < (1e-4 if name in ("out", "dv") else 2e-2), f"{name}: {error:.1e}"
