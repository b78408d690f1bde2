"""Contracts 2, 3 and 5: masked-out keys and rows, finite results, the same bits in every run."""

import pytest
import torch

import coneheads
from coneheads.backends import triton
from tests.backends.interpreted.common import (
    HALVES,
    attend,
    check_near,
    every_dtype,
    every_score,
    float32_and_half,
    leaves,
    without_warnings_of_numpy,
)

pytestmark = without_warnings_of_numpy


# --- 2. Masked-out keys, fully masked rows ---------------------------------------------------------------------------


def check_garbage(name, garbage, kind, dtype, masked_out=(1, 4, 8)):
    query, key, value = leaves((1, 1, 6, 10), (1, 1, 9, 10), (1, 1, 9, 5), dtype=dtype)
    masked_out = list(masked_out)
    allowed = torch.ones(6, 9, dtype=torch.bool)
    if kind == "causal":
        masked_out, arguments = [6, 7, 8], {"is_causal": True}
    else:
        allowed[:, masked_out] = False
        mask = allowed if kind == "boolean" else torch.zeros(6, 9).masked_fill(~allowed, -torch.inf)
        arguments = {"attn_mask": mask}

    def outcome(key, value):
        key, value = key.detach().requires_grad_(), value.detach().requires_grad_()
        out = attend(query, key, value, **arguments, score=name)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (query, key, value))]

    clean = outcome(key, value)
    bad_key, bad_value = key.detach().clone(), value.detach().clone()
    bad_key[:, :, masked_out] = garbage
    bad_value[:, :, masked_out] = garbage
    got = outcome(bad_key, bad_value)
    assert (got[2][:, :, masked_out] == 0).all()
    assert (got[3][:, :, masked_out] == 0).all()
    # Finite garbage may move the centre of the keys, and with it the rounding, but no more than that.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    check_near(got, clean, tolerance, ["out", "query", "key", "value"])


@every_score
@pytest.mark.parametrize("kind", ["boolean", "float", "causal"])
def test_masked_out_key_never_influences_output_or_gradient(name, kind):
    check_garbage(name, torch.nan, kind, torch.float32)


@every_score
@pytest.mark.parametrize("garbage", [torch.inf, 1e30])
def test_masked_out_key_of_any_size_never_influences_output_or_gradient(name, garbage):
    check_garbage(name, garbage, "boolean", torch.float32)


@every_score
def test_many_masked_out_keys_far_away_never_influence_output_or_gradient(name):
    """As the padding of a batch, which may be most of it."""
    check_garbage(name, 1e4, "boolean", torch.float32, masked_out=range(3, 9))


@pytest.mark.parametrize("name", ["penumbral", "umbral", "hyperboloid", "laplacian", "dot"])
@pytest.mark.parametrize("garbage", [torch.nan, 3e4])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masked_out_key_never_influences_half_precision(name, garbage, dtype):
    check_garbage(name, garbage, "boolean", dtype)


def test_key_that_later_queries_attend_to_does_not_reach_earlier_ones():
    query, key, value = leaves((1, 1, 18, 8), (1, 1, 18, 8), (1, 1, 18, 5))
    bad_key = key.detach().clone()
    bad_key[..., 4, 2] = torch.nan
    out = attend(query, bad_key, value, is_causal=True)
    assert out[..., :4, :].isfinite().all()
    assert out[..., 4:, :].isnan().all()


@float32_and_half
def test_nan_in_a_query_stays_in_its_row(dtype):
    query, key, value = leaves((1, 1, 6, 10), (1, 1, 6, 10), (1, 1, 6, 5), dtype=dtype)
    bad_query = query.detach().clone()
    bad_query[..., 2, 0] = torch.nan
    bad_query.requires_grad_()
    out = attend(bad_query, key, value)
    assert out[..., 2, :].isnan().all()
    rest = out[..., [0, 1, 3, 4, 5], :]
    grads = torch.autograd.grad(rest.sum(), (bad_query, key, value))
    assert rest.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@every_score
@float32_and_half
def test_fully_masked_row_gives_zero_output_and_gradient(name, dtype):
    query, key, value = leaves((1, 1, 5, 8), (1, 1, 7, 8), (1, 1, 7, 3), dtype=dtype)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    added = torch.zeros(5, 7).masked_fill(~mask, -torch.inf).requires_grad_()
    for attn_mask in (mask, added):
        out, lse = attend(query, key, value, attn_mask, score=name, return_lse=True)
        assert (out[..., 2, :] == 0).all()
        assert (lse[..., 2] == -torch.inf).all()
        wanted = (query, key, value) if attn_mask is mask else (query, key, value, added)
        grads = torch.autograd.grad(out.float().square().sum(), wanted)
        assert (grads[0][..., 2, :] == 0).all()
        assert all(grad.isfinite().all() for grad in grads)
    assert (grads[3][2] == 0).all()
    assert (grads[3][:2] != 0).any()


def test_no_keys_at_all_give_zero():
    query, key, value, mask = leaves((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 4), (5, 1))
    out, lse = attend(query, key, value, mask, return_lse=True)
    assert out.shape == (2, 3, 5, 4)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), (query, key, value, mask)):
        assert (grad == 0).all()


def test_no_queries_at_all():
    query, key, value = leaves((1, 1, 0, 8), (1, 1, 4, 8), (1, 1, 4, 4))
    out = attend(query, key, value)
    assert out.shape == (1, 1, 0, 4)
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (query, key, value)))


# --- 3. Finite inputs ------------------------------------------------------------------------------------------------

EXTREMES = {
    torch.float32: [0.0, 1.0, 1e-38, 1e19, 3e38, -3e38],
    torch.float16: [0.0, 1.0, 65504.0, -65504.0],
    torch.bfloat16: [0.0, 1.0, 3.38e38, -3.38e38],
}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [pytest.param(torch.float32, 3, marks=pytest.mark.slow), *((dtype, 12) for dtype in triton.DTYPES)],
    ids=str,
)
@every_score
def test_extreme_features_give_finite_output_and_gradient(name, dtype, size):
    """Each fill is a head."""
    fills = torch.tensor(EXTREMES[dtype]).view(1, -1, 1, 1)
    query, key = (fills.expand(1, -1, n, size).to(dtype).requires_grad_() for n in (2, 3))
    value = torch.randn(1, fills.numel(), 3, 4).to(dtype).requires_grad_()
    out = attend(query, key, value, score=name)
    grads = torch.autograd.grad(out.float().square().sum(), (query, key, value))
    for what, result in zip(("out", "query", "key", "value"), (out, *grads), strict=True):
        bad = [fill for i, fill in enumerate(EXTREMES[dtype]) if not result[:, i].isfinite().all()]
        assert not bad, f"{what} of {name} is not finite for features {bad}"


@every_dtype
@every_score
def test_large_features_give_finite_output_and_gradient(name, dtype):
    """Each size is a head. Where scores are so large that their roundings are, too, weights must not overflow."""
    sizes = torch.tensor([30.0, 1e3, 1e4] + ([] if dtype == torch.float16 else [1e10, 1e15, 1e37])).view(1, -1, 1, 1)
    query, key = ((torch.randn(1, sizes.numel(), n, 12) * sizes).to(dtype) for n in (7, 9))
    tensors = [t.requires_grad_() for t in (query, key, torch.randn(1, sizes.numel(), 9, 4).to(dtype))]
    out = attend(*tensors, score=name)
    assert out.isfinite().all()
    grads = torch.autograd.grad(out, tensors, torch.randn_like(out))
    for what, grad in zip(("query", "key", "value"), grads, strict=True):
        bad = sizes[0, ~grad.isfinite().flatten(2).all(-1)[0]].flatten().tolist()
        assert not bad, f"the gradient of {what} is not finite for features times {bad}"


@every_dtype
@every_score
def test_extreme_features_beside_ordinary_ones_give_finite_output_and_gradient(name, dtype):
    query, key, value = (torch.randn(1, 1, n, 12) for n in (4, 18, 18))
    for fill, row in zip(EXTREMES[dtype], range(len(EXTREMES[dtype])), strict=True):
        key[..., 2 * row, :] = fill
    query[..., 1, :], query[..., 2, :] = EXTREMES[dtype][-1], -EXTREMES[dtype][-1]
    tensors = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    out = attend(*tensors, score=name)
    assert out.isfinite().all()
    for what, grad in zip(
        ("query", "key", "value"), torch.autograd.grad(out, tensors, torch.randn_like(out)), strict=True
    ):
        assert grad.isfinite().all(), what


@float32_and_half
@pytest.mark.parametrize("size", [7, 33])
@every_score
def test_distance_of_a_point_to_itself_is_exactly_zero(name, size, dtype):
    """A row that attends to its own key alone has the score of the two as its log-sum-exp."""
    query = torch.randn(1, 1, 16, size).to(dtype)
    _, lse = attend(query, query.clone(), query, torch.eye(16, dtype=torch.bool), score=name, return_lse=True)
    if name in ("laplacian", "half_space", "hyperboloid"):
        assert (lse == 0).all()
    else:
        want = coneheads.attention_scores(query.double(), query.double(), score=name).diagonal(dim1=-2, dim2=-1)
        # Levels are float32, but those of penumbral cones have 16 bits in half precision where distances come from
        # products. Of a product the inputs are exact, and their sum is float32.
        short = name == "penumbral" and dtype != torch.float32 and size > 8
        check_near([lse], [want], 2**-17 if short else 2e-6)


@every_dtype
@pytest.mark.parametrize("readout", ["height", "height_sq", "distance"])
@pytest.mark.parametrize("features", [-13.0, -35.0])
def test_lowest_heights_are_read_as_they_are(readout, features, dtype):
    """Heights down to 1e-15, whose squares are divided by; some points are equal, so that nothing else is in them."""
    query, key = torch.randn(1, 1, 6, 16), torch.randn(1, 1, 7, 16)
    query[..., -1] = key[..., -1] = features
    key[:, :, :4] = query[:, :, :4]
    tensors = [t.to(dtype) for t in (query, key, torch.randn(1, 1, 7, 4))]
    weight = torch.randn(1, 1, 6, 4)
    results = []
    for backend, wide in (("triton", dtype), ("reference", torch.float64)):
        leaves = [t.detach().to(wide).requires_grad_() for t in tensors]
        out, lse = attend(*leaves, score=coneheads.Penumbral(readout=readout), backend=backend, return_lse=True)
        results.append([out, lse, *torch.autograd.grad((out * weight.to(wide)).sum(), leaves)])
    names = ["out", "lse", "query", "key", "value"]
    check_near(*results, 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps, names)


# --- 5. Determinism --------------------------------------------------------------------------------------------------


@float32_and_half
@pytest.mark.parametrize("name", ["penumbral", "dot"])
def test_two_runs_give_the_same_bits(name, dtype):
    tensors = leaves((1, 2, 18, 16), (1, 2, 20, 16), (1, 2, 20, 8), dtype=dtype)
    tensors[1].data[:, :, :18] = tensors[0].data  # near pairs, which go another way

    def run():
        gamma = torch.ones(2, requires_grad=True)
        mask = torch.zeros(20, requires_grad=True)
        score = coneheads.DotProduct(scale=gamma) if name == "dot" else coneheads.Penumbral(gamma=gamma)
        out = attend(*tensors, mask, score=score)
        return out, *torch.autograd.grad(out.float().square().sum(), (*tensors, gamma, mask))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(coneheads.Penumbral, ("light_height", "gamma")), (coneheads.Umbral, ("radius", "gamma"))],
)
def test_a_parameter_alone_has_the_gradient_it_has_beside_the_other(kind, names):
    """Backward leaves out the sums that nobody wants."""
    query, key, value = leaves((1, 2, 9, 6), (1, 2, 21, 6), (1, 2, 21, 4))

    def gradients(learned):
        numbers = {name: torch.tensor(0.7, requires_grad=name in learned) for name in names}
        out = coneheads.attention(query, key, value, score=kind(**numbers), backend="triton")
        return torch.autograd.grad(out.square().sum(), [numbers[name] for name in learned])

    both = gradients(names)
    assert all(grad.abs() > 1e-3 for grad in both)
    assert both == tuple(gradients([name])[0] for name in names)
