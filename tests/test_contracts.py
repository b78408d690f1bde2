"""The contracts of the operator that DESIGN names, 2 to 7, each by name. (1: test_accuracy, 8: test_errors.)"""

import pytest
import torch

import coneheads
from coneheads import backends
from tests.cases import BACKEND_NAMES, DTYPE_IDS, DTYPES, SCORE_NAMES, SHAPES, masks

every_backend = pytest.mark.parametrize("backend", BACKEND_NAMES)
every_score = pytest.mark.parametrize("name", SCORE_NAMES)


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# --- 2. Masked-out keys, fully masked rows -------------------------------------------------------------------------


@every_backend
@every_score
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("kind", ["boolean", "float", "causal"])
def test_masked_out_key_never_influences_output_or_gradient(name, backend, garbage, kind):
    query, key, value = leaves((2, 2, 6, 8), (2, 2, 9, 8), (2, 2, 9, 5), dtype=torch.float64)
    allowed = torch.ones(6, 9, dtype=torch.bool)
    if kind == "causal":
        masked_out, arguments = [6, 7, 8], {"is_causal": True}
    else:
        masked_out = [1, 4, 8]
        allowed[:, masked_out] = False
        mask = allowed if kind == "boolean" else torch.zeros(6, 9).masked_fill(~allowed, -torch.inf)
        arguments = {"attn_mask": mask}

    def outcome(key, value):
        key, value = key.detach().requires_grad_(), value.detach().requires_grad_()
        out = coneheads.attention(query, key, value, **arguments, score=name, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), (query, key, value))

    clean = outcome(key, value)
    bad_key, bad_value = key.detach().clone(), value.detach().clone()
    bad_key[:, :, masked_out] = garbage
    bad_value[:, :, masked_out] = garbage
    for got, want in zip(outcome(bad_key, bad_value), clean, strict=True):
        # Finite garbage may move the centre of the keys, and with it the rounding, but no more than that.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10 * want.abs().max().item())
    assert (clean[2][:, :, masked_out] == 0).all()
    assert (clean[3][:, :, masked_out] == 0).all()


@every_backend
@every_score
def test_many_masked_out_keys_far_away_do_not_influence_the_rest(name, backend):
    """Most of the keys, as in a cache that is not full yet: they must not move the centre of the positions."""
    query, key, value = (torch.randn(1, 2, n, 12) for n in (6, 9, 9))
    mask = torch.arange(9) < 3
    far = key.masked_fill(~mask[:, None], 1e4)
    clean, got = (coneheads.attention(query, k, value, mask, score=name, backend=backend) for k in (key, far))
    torch.testing.assert_close(got, clean, rtol=0, atol=2e-5)


@every_backend
def test_key_that_later_queries_attend_to_does_not_reach_earlier_ones(backend):
    query, key, value = leaves((1, 1, 6, 8), (1, 1, 6, 8), (1, 1, 6, 5))
    bad_key = key.detach().clone()
    bad_key[..., 4, 2] = torch.nan
    out = coneheads.attention(query, bad_key, value, is_causal=True, backend=backend)
    assert out[..., :4, :].isfinite().all()
    assert out[..., 4:, :].isnan().all()


@every_backend
def test_nan_in_a_query_stays_in_its_row(backend):
    query, key, value = leaves((1, 1, 6, 8), (1, 1, 6, 8), (1, 1, 6, 5))
    bad_query = query.detach().clone()
    bad_query[..., 2, 0] = torch.nan
    bad_query.requires_grad_()
    out = coneheads.attention(bad_query, key, value, backend=backend)
    assert out[..., 2, :].isnan().all()
    rest = out[..., [0, 1, 3, 4, 5], :]
    grads = torch.autograd.grad(rest.sum(), (bad_query, key, value))
    assert rest.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@every_backend
@every_score
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_fully_masked_row_gives_zero_output_and_gradient(name, backend, dtype):
    query, key, value = leaves((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3), dtype=dtype)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    for attn_mask in (mask, torch.zeros(5, 7).masked_fill(~mask, -torch.inf)):
        out, lse = coneheads.attention(query, key, value, attn_mask, score=name, backend=backend, return_lse=True)
        assert (out[..., 2, :] == 0).all()
        assert (lse[..., 2] == -torch.inf).all()
        grads = torch.autograd.grad(out.sum(), (query, key, value))
        assert (grads[0][..., 2, :] == 0).all()
        assert all(grad.isfinite().all() for grad in grads)
    assert (coneheads.attention_weights(query, key, mask, score=name)[..., 2, :] == 0).all()


@every_backend
def test_no_keys_at_all_give_zero(backend):
    out, lse = coneheads.attention(
        torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8), torch.randn(2, 3, 0, 4), backend=backend, return_lse=True
    )
    assert out.shape == (2, 3, 5, 4)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


# --- 3. Finite inputs (the fuzz test goes further) -------------------------------------------------------------------


@every_backend
@every_score
@pytest.mark.parametrize("fill", [0.0, 1.0, -1.0, 1e-38, 1e-45, 1e19, 3e38, -3e38])
def test_extreme_features_give_finite_output_and_gradient(name, backend, fill):
    query, key = torch.full((2, 1, 2, 4, 3), fill).requires_grad_().unbind(0)
    value = torch.randn(1, 2, 4, 3, requires_grad=True)
    out = coneheads.attention(query, key, value, score=name, backend=backend)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (query, key, value)))


@every_score
def test_distance_of_a_point_to_itself_is_exactly_zero(name):
    query = torch.randn(1, 1, 50, 33)
    scores = coneheads.attention_scores(query, query.clone(), score=name)
    if name in ("laplacian", "half_space", "hyperboloid"):
        assert (scores.diagonal(dim1=-2, dim2=-1) == 0).all()
    if name != "dot":  # each point's best score is its own, or it is tied with that of an ancestor
        assert (scores.amax(-1) == scores.diagonal(dim1=-2, dim2=-1)).all()


# --- 5. Gradients, and determinism -----------------------------------------------------------------------------------

LEARNABLE = [
    (coneheads.Penumbral, {"light_height": 1.3, "gamma": 0.7, "height_scale": 0.9}),
    (coneheads.Umbral, {"radius": 0.4, "gamma": 0.7, "height_scale": 0.9}),
    (coneheads.FinitePenumbral, {"light_radius": 0.3, "gamma": 0.7}),
    (coneheads.FiniteUmbral, {"radius": 0.3, "gamma": 0.7}),
    (coneheads.HalfSpaceDistance, {"beta": 0.7, "offset": 0.2}),
    (coneheads.HyperboloidDistance, {"beta": 0.7, "offset": 0.2}),
    (coneheads.Laplacian, {"gamma": 0.7}),
    (coneheads.DotProduct, {"scale": 0.3}),
]


@every_backend
@pytest.mark.parametrize(("make", "values"), LEARNABLE, ids=[make.__name__ for make, _ in LEARNABLE])
@pytest.mark.parametrize("shape", [(), (4,), (4, 1, 1), (2, 1, 1, 1), (2, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_gradients_reach_every_parameter(make, values, backend, shape, enable_gqa):
    query, key, value = leaves(
        (2, 4, 3, 4), (2, 2 if enable_gqa else 4, 5, 4), (2, 2 if enable_gqa else 4, 5, 2), dtype=torch.float64
    )
    parameters = {
        name: (value * torch.rand(shape, dtype=torch.float64).add(0.5)).requires_grad_()
        for name, value in values.items()
    }

    def out(query, *tensors):
        score = make(**dict(zip(values, tensors, strict=True)))
        return coneheads.attention(query, key, value, score=score, backend=backend, enable_gqa=enable_gqa)

    assert torch.autograd.gradcheck(out, (query, *parameters.values()), fast_mode=True)


@every_backend
@every_score
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 1, 3, 5), (2, 1, 1, 5), (3, 1), (5,)], ids=str)
def test_gradients_reach_a_float_mask_of_every_shape(name, backend, shape):
    query, key, value, mask = leaves((2, 4, 3, 4), (2, 4, 5, 4), (2, 4, 5, 2), shape, dtype=torch.float64)

    def out(mask):
        return coneheads.attention(query, key, value, mask, score=name, backend=backend)

    assert torch.autograd.gradcheck(out, (mask,), fast_mode=True)


@every_backend
def test_two_runs_give_the_same_bits(backend):
    tensors = leaves((2, 4, 130, 16), (2, 4, 140, 16), (2, 4, 140, 8))
    tensors[1].data[:, :, :130] = tensors[0].data  # near pairs, which go another way

    def run():
        out = coneheads.attention(*tensors, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


# --- 6. Where it works (compile and export: test_compile) ------------------------------------------------------------


@every_backend
@every_score
def test_inference_mode(name, backend):
    query, key, value = SHAPES[0].tensors(torch.float32)
    want = coneheads.attention(query, key, value, score=name, backend=backend)
    with torch.inference_mode():
        got = coneheads.attention(query, key, value, score=name, backend=backend)
    torch.testing.assert_close(got, want)


@every_backend
@every_score
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs_and_computes_in_float32(name, backend, dtype):
    query, key, value = leaves((2, 2, 7, 8), (2, 2, 9, 8), (2, 2, 9, 5))
    want = coneheads.attention(*(t.to(dtype) for t in (query, key, value)), score=name, backend=backend)
    with torch.autocast("cpu", dtype=dtype):
        mixed = coneheads.attention(query, key.to(dtype), value, score=name, backend=backend)
        sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        if backend != "reference":  # a backward inside autocast is not cast; plain PyTorch's would be
            grads = torch.autograd.grad(mixed.float().square().sum(), (query, key, value))
    if backend == "reference":
        grads = torch.autograd.grad(mixed.float().square().sum(), (query, key, value))
    assert mixed.dtype == sdpa.dtype == dtype
    assert torch.equal(mixed, want)
    outside = coneheads.attention(*(t.to(dtype) for t in (query, key, value)), score=name, backend=backend)
    for got, expected in zip(
        grads, torch.autograd.grad(outside.float().square().sum(), (query, key, value)), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", [backend.name for backend in backends.BACKENDS if not backend.devices])
@every_score
def test_other_devices(name, backend):
    """No other device is at hand; tensors without data go through every shape and dtype that a device would see."""
    query, key, value = (torch.randn(2, 4, n, 8, device="meta", requires_grad=True) for n in (5, 7, 7))
    gamma = torch.ones(4, device="meta", requires_grad=True)
    score = name if name in ("dot", "half_space", "hyperboloid") else coneheads.scores.BY_NAME[name](gamma=gamma)
    mask = torch.ones(5, 7, device="meta")
    out, lse = coneheads.attention(query, key, value, mask, 0.1, score=score, backend=backend, return_lse=True)
    assert (out.shape, out.device.type, out.dtype) == ((2, 4, 5, 8), "meta", torch.float32)
    assert (lse.shape, lse.device.type, lse.dtype) == ((2, 4, 5), "meta", torch.float32)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    assert coneheads.attention_weights(query, key, score=score).shape == (2, 4, 5, 7)


@every_backend
def test_half_precision_computes_in_float32(backend):
    query, key, value = (t.half() for t in SHAPES[0].tensors(torch.float32))
    got = coneheads.attention(query, key, value, score="umbral", backend=backend)
    exact = coneheads.attention(query.float(), key.float(), value.float(), score="umbral", backend=backend)
    assert torch.equal(got, exact.half())


@every_backend
@every_score
def test_second_derivative_where_declared_and_a_clear_error_elsewhere(name, backend):
    query, key, value = leaves((1, 1, 2, 3), (1, 1, 3, 3), (1, 1, 3, 2), dtype=torch.float64)

    def out(query, key, value):
        return coneheads.attention(query, key, value, score=name, backend=backend)

    if backends.BACKENDS[backends.NAMES.index(backend)].second_derivative:
        assert torch.autograd.gradgradcheck(out, (query, key, value))
        return
    grad = torch.autograd.grad(out(query, key, value).sum(), query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"backend='{backend}' has no second derivative.*use backend='reference'"):
        grad.sum().backward()


@every_backend
def test_gradient_checkpointing(backend):
    query, key, value = leaves((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))

    def out(query, key, value):
        attended = coneheads.attention(query, key, value, backend=backend)
        return attended + coneheads.attention_weights(query, key) @ value

    again = torch.utils.checkpoint.checkpoint(out, query, key, value, use_reentrant=False)
    for a, b in zip(
        *(torch.autograd.grad(o.sum(), (query, key, value)) for o in (out(query, key, value), again)), strict=True
    ):
        assert torch.equal(a, b)


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vmap": lambda f, q: torch.func.vmap(f)(q),
    "vmap of grad": lambda f, q: torch.func.vmap(torch.func.grad(lambda q: f(q).sum()))(q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1],
    "hessian": lambda f, q: torch.func.hessian(lambda q: f(q).sum())(q),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_transforms_of_torch_func_where_declared_and_a_clear_error_elsewhere(transform, dtype):
    query = torch.randn(2, 3, 4).to(dtype)

    def using(backend):
        def both(q):
            return coneheads.attention(q, q, q, backend=backend) + coneheads.attention_weights(q, q) @ q

        return TRANSFORMS[transform](both, query)

    torch.testing.assert_close(using("auto"), using("reference"))
    assert using("auto").isfinite().all()
    with pytest.raises(ValueError, match=r"backend='chunked' cannot serve .* torch.func .* can: 'reference'"):
        using("chunked")


# --- 7. Backends -----------------------------------------------------------------------------------------------------


def test_available_backends_are_the_declared_ones_and_one_always_works():
    kernels = ["cpp"] if backends.build.why_unavailable() is None else []
    kernels += ["triton"] if backends.triton.available() else []
    assert coneheads.available_backends() == [*kernels, "chunked", "reference"]
    for shape in SHAPES:
        for dtype in DTYPES:
            query, key, value = shape.tensors(dtype)
            inputs = backends.Inputs(query, key, value, None, False, 0.0, None, coneheads.Penumbral())
            assert backends.choose("auto", inputs).name in coneheads.available_backends()


def test_explicit_backend_that_cannot_serve_says_why_and_names_those_that_can(monkeypatch):
    limited = backends.Backend(
        name="chunked",
        attention=backends.chunked.attention,
        summary="",
        memory="",
        second_derivative=False,
        transforms=False,
        devices=("cuda",),
        dtypes=(torch.float32,),
    )
    monkeypatch.setattr(backends, "BACKENDS", (limited, backends.BACKENDS[-1]))
    monkeypatch.setattr(backends, "NAMES", ("chunked", "reference"))
    query = torch.randn(2, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="backend='chunked' cannot serve this call") as caught:
        coneheads.attention(query, query, query, backend="chunked")
    text = str(caught.value)
    assert "it runs on cuda and query is on cpu; it takes float32 and query is float64" in text
    assert "Those that can: 'reference'" in text
    coneheads.attention(query, query, query)  # auto goes on to the one that can


@every_backend
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_backend_writes_into_its_inputs(backend, shape):
    tensors = shape.tensors(torch.float32)
    for mask in masks(shape).values():
        before = [t.clone() for t in (*tensors, *(m for m in mask.values() if isinstance(m, torch.Tensor)))]
        coneheads.attention(*tensors, **mask, backend=backend, enable_gqa=shape.gqa)
        after = (*tensors, *(m for m in mask.values() if isinstance(m, torch.Tensor)))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@every_backend
@pytest.mark.parametrize(("length", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_query_and_no_key_give_empty_results(length, keys, backend):
    query, key, value = torch.randn(2, 3, length, 4), torch.randn(2, 3, keys, 4), torch.randn(2, 3, keys, 6)
    out = coneheads.attention(query, key, value, backend=backend)
    assert out.shape == (2, 3, length, 6)
    assert (out == 0).all()
    assert coneheads.attention_weights(query, key).shape == (2, 3, length, keys)
    assert coneheads.attention_scores(query, key).shape == (2, 3, length, keys)
