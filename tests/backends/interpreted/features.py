"""Every lift, read-out, parameter and mask beside the reference; dropout; compile, inference mode, autocast."""

import pytest
import torch

import coneheads
from coneheads import backends
from coneheads.backends import ops
from coneheads.scores import BY_NAME, resolve
from tests.backends.interpreted.common import (
    HALVES,
    attend,
    check_near,
    check_parity,
    leaves,
    without_warnings_of_numpy,
)
from tests.cases import SCORE_NAMES, Shape, masks

pytestmark = without_warnings_of_numpy


# --- Parity with the reference ---------------------------------------------------------------------------------------

VARIANTS = {
    **{name: cls() for name, cls in BY_NAME.items()},
    **{f"penumbral {readout}": coneheads.Penumbral(readout=readout) for readout in ("height_sq", "distance")},
    "penumbral psi": coneheads.Penumbral(lift="psi", light_height=1.5, height_scale=0.5),
    "penumbral exp": coneheads.Penumbral(lift="exp", readout="distance"),
    "umbral height_sq": coneheads.Umbral(readout="height_sq", radius=0.5, gamma=0.01),
    "umbral distance": coneheads.Umbral(readout="distance"),
    "umbral exp": coneheads.Umbral(lift="exp", radius=0.3),
    "half_space exp": coneheads.HalfSpaceDistance(lift="exp", beta=0.5, offset=0.1),
}
every_variant = pytest.mark.parametrize("score", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_parity_of_every_lift_and_readout(score, poisoned):
    check_parity(score, (1, 1, 1, 5, 18, 12, 3))


def random_parameters(score, shape):
    return {field: (value or 0.2) * (0.5 + torch.rand(shape)) for field, value in score.parameters().items()}


@every_variant
def test_gradients_reach_every_parameter(score):
    score = score.for_size(5)
    check_parity(score, (1, 2, 1, 3, 4, 5, 2), random_parameters(score, (2,)))


@pytest.mark.parametrize("shape", [(), (2, 1, 1), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["penumbral", "umbral"])
def test_gradients_reach_parameters_of_every_shape(name, shape):
    check_parity(resolve(name), (2, 2, 1, 3, 4, 5, 2), random_parameters(resolve(name), shape))


@pytest.mark.parametrize("sizes", [(20, 36), (36, 20), (16, 17), (33, 1)], ids=str)
@pytest.mark.parametrize("name", ["penumbral", "dot"])
def test_causal_attention_over_several_tiles(name, sizes):
    check_parity(resolve(name).for_size(12), (1, 1, 1, *sizes, 12, 3), is_causal=True)


# Masks, and the sizes of their calls: B, H, L, S. Each shape that entries are shared over several tiles in some way.
MASKS = [
    ((2, 2, 3, 18), (2, 2, 3, 18)),
    ((2, 1, 1, 18), (2, 2, 3, 18)),
    ((1, 2, 1, 1), (2, 2, 3, 18)),
    ((18,), (1, 2, 3, 18)),
    ((18, 1), (2, 1, 18, 3)),
    ((3,), (2, 1, 18, 3)),
    ((18, 20), (1, 2, 18, 20)),
    ((1, 1, 1, 1), (1, 1, 18, 20)),
]


@pytest.mark.parametrize(("shape", "sizes"), MASKS, ids=str)
def test_gradients_reach_a_float_mask_of_every_shape(shape, sizes, poisoned):
    batch, heads, length, keys = sizes
    check_parity(coneheads.Penumbral(), (batch, heads, 1, length, keys, 5, 3), mask=torch.randn(shape))


def test_masks_are_read_by_their_strides():
    for mask in (
        torch.randn(2, 1, 1, 18).expand(2, 2, 3, 18),
        torch.randn(2, 18, 3, 2).permute(0, 3, 2, 1),
        torch.randn(2, 2, 3, 36)[..., ::2],
        torch.randn(1, 1, 3, 1).expand(2, 2, 3, 18),
    ):
        check_parity(coneheads.Laplacian(), (2, 2, 2, 3, 18, 5, 3), mask=mask)
        tensors = [torch.randn(2, 2, n, 5) for n in (3, 18, 18)]
        boolean = mask > -0.5
        check_near([attend(*tensors, attn_mask=boolean)], [attend(*tensors, attn_mask=boolean.contiguous())], 0)
        check_near(
            [attend(*tensors, attn_mask=boolean)], [attend(*tensors, attn_mask=boolean, backend="reference")], 1e-5
        )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_of_a_mask_in_half_precision(dtype):
    query, key, value, mask = leaves((1, 2, 3, 9), (1, 2, 18, 9), (1, 2, 18, 4), (2, 1, 18), dtype=dtype)
    results = []
    for backend in ("triton", "reference"):
        out = attend(query, key, value, mask, backend=backend)
        results.append(torch.autograd.grad(out.float().square().sum(), mask))
    assert results[0][0].dtype == dtype
    check_near(*results, 4 * torch.finfo(dtype).eps)


def test_results_do_not_depend_on_the_blocks(monkeypatch):
    """The GPU takes other blocks than the interpreter, and may try several."""
    from coneheads.backends.triton import blocks

    tensors = leaves((1, 2, 36, 12), (1, 1, 40, 12), (1, 1, 40, 3))
    mask = torch.randn(36, 40, requires_grad=True)
    results = []
    for rows, columns in ((16, 16), (32, 64)):
        chosen = blocks.Blocks(rows, columns, 4, 1)
        monkeypatch.setattr(blocks, "default_blocks", lambda *_, chosen=chosen: chosen)
        torch.manual_seed(1)
        out = attend(*tensors, mask, 0.3, enable_gqa=True)
        causal = attend(*tensors, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(out.square().sum() + causal.square().sum(), (*tensors, mask))
        results.append([out.detach(), causal.detach(), *grads])
    for other in results[1:]:
        check_near(other, results[0], 1e-5)


# --- Scaled lengths --------------------------------------------------------------------------------------------------


@pytest.fixture
def scaled(monkeypatch):
    """For every call of a kernel from here on, whether it has scaled lengths."""
    from coneheads.backends.triton import launch

    found, start = [], launch.Call.launch

    def spy(call, *arguments, **named):
        found.append(call.scaled)
        start(call, *arguments, **named)

    monkeypatch.setattr(launch.Call, "launch", spy)
    return found


CONES = [
    coneheads.Penumbral(),
    coneheads.Penumbral(gamma=10.0, light_height=0.03),
    coneheads.Umbral(),
    coneheads.Umbral(gamma=0.02, radius=3.0),
]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("score", CONES, ids=str)
def test_fixed_and_learned_numbers_give_the_same(score, dtype, scaled):
    shapes = (1, 2, 15, 12), (1, 1, 18, 12), (1, 1, 18, 3)
    tensors, weight, weight_lse = leaves(*shapes, dtype=dtype), torch.randn(1, 2, 15, 3), torch.randn(1, 2, 15)
    learned = {name: torch.tensor(getattr(score, name)) for name in score.pair_fields}
    results = []
    for backend, given in (("triton", score), ("triton", score.with_parameters(learned)), ("reference", score)):
        copies = [t.detach().to(torch.float64 if backend == "reference" else dtype).requires_grad_() for t in tensors]
        out, lse = attend(*copies, backend=backend, score=given, enable_gqa=True, return_lse=True)
        loss = (out * weight.to(out.dtype)).sum() + (lse * weight_lse.to(lse.dtype)).sum().to(out.dtype)
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, copies)])
    # forward and three kernels of backward each
    assert scaled == [True] * 4 + [False] * 4
    ours, unscaled, truth = results
    names = ["out", "lse", "query", "key", "value"]
    for name, one, two, want in zip(names, ours, unscaled, truth, strict=True):
        errors = [(t.double() - want).norm() / want.norm() for t in (one, two)]
        # A kink of a score, where a rounding decides about a slope, may be met by either.
        assert errors[0] <= 2 * errors[1] + 4 * torch.finfo(dtype).eps, f"{name}: {errors}"


@pytest.mark.parametrize("gamma", [0.0, 1e-30, 1e6])
@pytest.mark.parametrize("cone", [coneheads.Penumbral, coneheads.Umbral])
def test_numbers_of_unusual_size_are_no_scale(cone, gamma, scaled):
    tensors = [torch.randn(1, 2, n, 12).bfloat16() for n in (5, 18, 18)]
    out = attend(*tensors, score=cone(gamma=gamma))
    assert scaled == [False]
    if gamma < 1:
        check_near([out], [tensors[2].float().mean(-2, keepdim=True).expand_as(out)], 0.01)
    else:
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("score", CONES[::2], ids=str)
def test_nan_in_a_key_reaches_what_attends_to_it_in_half_precision(score, dtype, scaled):
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 2, 9, 12).to(dtype))
    bad = key.detach().clone()
    bad[0, 1, 4, 3] = torch.nan
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[7:, 4] = False
    out = attend(query, bad.requires_grad_(), value, attn_mask=mask, score=score)
    assert all(scaled)
    rows = torch.zeros(1, 2, 9, dtype=torch.bool)
    rows[0, 1, :7] = True
    assert torch.equal(out.isnan().all(-1), rows)
    assert torch.equal(out.isnan().any(-1), rows)
    whole = attend(query, key, value, attn_mask=mask, score=score)
    torch.testing.assert_close(out[~rows], whole[~rows], rtol=0, atol=0)
    grads = torch.autograd.grad(out[~rows].float().sum(), (query, bad, value))
    assert all(grad.isfinite().all() for grad in (*grads[0][~rows][None], grads[1][:, :1], grads[2][:, :1]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("score", CONES, ids=str)
def test_what_fills_up_the_last_tile_has_no_weight(score, dtype, scaled):
    """However far the keys are: a mean of 1s is 1, but for what rounds weights, and what has weight would add 0s."""
    sizes = torch.tensor([1.0, 1e4] + ([] if dtype == torch.float16 else [1e10, 1e15, 1e37])).view(1, -1, 1, 1)
    query, key = ((torch.randn(1, sizes.numel(), n, 256) * sizes).to(dtype) for n in (5, 17))
    query, key, value = (t.requires_grad_() for t in (query, key, torch.ones(1, sizes.numel(), 17, 2).to(dtype)))
    out = attend(query, key, value, score=score)
    assert ((out - 1).abs() < 0.01).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (query, key, value)))
    assert all(scaled)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("light_height", [1.0, 0.7, 3.0])
def test_points_at_the_light_in_half_precision(light_height, dtype):
    """They are so near to it that their levels round to its own. Half of the keys are queries, too."""
    query, key, value = torch.randn(1, 1, 15, 12), torch.randn(1, 1, 18, 12), torch.randn(1, 1, 18, 3)
    query[..., -1] += 40
    key[..., -1] += torch.tensor([40.0, -3.0, 8.0]).repeat(6)
    key[:, :, :9] = query[:, :, :9]
    weight = torch.randn(1, 1, 15, 3)
    score = coneheads.Penumbral(light_height=light_height, gamma=4.0)
    results = []
    for backend, wide in (("triton", dtype), ("reference", torch.float64)):
        tensors = [t.to(dtype).to(wide).requires_grad_() for t in (query, key, value)]
        out, lse = attend(*tensors, score=score, backend=backend, return_lse=True)
        results.append([out, lse, *torch.autograd.grad((out * weight.to(wide)).sum(), tensors)])
    check_near(*results, 16 * torch.finfo(dtype).eps, ["out", "lse", "query", "key", "value"])


# --- Dropout ---------------------------------------------------------------------------------------------------------

DROPPED = 0.4


def dropped_weights(query, key, seed, **arguments):
    """The weights after dropout: what attention makes of the identity as value."""
    torch.manual_seed(seed)
    value = torch.eye(key.shape[2], dtype=query.dtype).expand(*key.shape[:2], -1, -1)
    return attend(query, key, value, dropout_p=DROPPED, **arguments)


def test_dropout_drops_its_share_and_scales_the_rest():
    query, key = torch.randn(2, 2, 18, 6), torch.randn(2, 1, 20, 6)
    dropped = dropped_weights(query, key, 3, enable_gqa=True)
    weights = coneheads.attention_weights(query.double(), key.double(), enable_gqa=True)
    kept = dropped != 0
    check_near([dropped], [weights * kept / (1 - DROPPED)], 1e-5)
    for dim in range(4):  # along every dimension
        others = [d for d in range(4) if d != dim]
        n = kept.numel() / kept.shape[dim]
        assert ((kept.double().mean(others) - (1 - DROPPED)).abs() < 5 * (DROPPED * (1 - DROPPED) / n) ** 0.5).all()
    signs = kept.double() - (1 - DROPPED)
    for other in (*(signs.roll(1, dim) for dim in range(4)), signs[..., :18].mT):  # no two places choose alike
        pairs = signs[..., : other.shape[-1]] * other
        assert pairs.mean().abs() < 5 * DROPPED * (1 - DROPPED) / pairs.numel() ** 0.5


def test_dropout_is_seeded_by_torch_and_differs_from_call_to_call():
    query = torch.randn(1, 2, 18, 8)
    torch.manual_seed(0)
    first, second = (attend(query, query, query, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(first, attend(query, query, query, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_lse_is_that_of_all_weights():
    query = torch.randn(1, 1, 18, 8)
    lse = [attend(query, query, query, dropout_p=p, return_lse=True)[1] for p in (0.0, 0.5)]
    torch.testing.assert_close(lse[1], lse[0])


@pytest.mark.parametrize(("name", "causal"), [*((name, False) for name in SCORE_NAMES), ("penumbral", True)])
def test_backward_replays_the_same_choices(name, causal):
    """Gradients beside those of dense attention in float64 whose weights are dropped as they were seen to be."""
    query, key, value, mask = leaves((1, 2, 5, 6), (1, 1, 18, 6), (1, 1, 18, 3), (5, 18))
    arguments = {"is_causal": True} if causal else {"attn_mask": mask.detach()}
    score = resolve(name)
    kept = dropped_weights(query, key, 5, score=score, enable_gqa=True, **arguments) != 0
    wanted = (query, key, value) if causal else (query, key, value, mask)
    if not causal:
        arguments = {"attn_mask": mask}
        assert 0.3 < kept.double().mean() < 0.9
    torch.manual_seed(5)
    out = attend(query, key, value, dropout_p=DROPPED, score=score, enable_gqa=True, **arguments)
    weight = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, wanted, weight)]

    doubles = [t.detach().double().requires_grad_() for t in wanted]
    if not causal:
        arguments = {"attn_mask": doubles[3]}
    weights = coneheads.attention_weights(*doubles[:2], score=score, enable_gqa=True, **arguments)
    dense = (weights * kept / (1 - DROPPED)) @ doubles[2]
    truth = [dense, *torch.autograd.grad(dense, doubles, weight.double())]
    check_near(
        [t.detach() for t in got],
        [t.detach() for t in truth],
        1e-4,
        ["out", "query", "key", "value", "mask"][: len(got)],
    )


# --- 6. Where it works -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["penumbral", "umbral", "dot"])
def test_operator_keeps_what_it_declares(name):
    score = resolve(name).for_size(5)
    query, key, value = leaves((1, 2, 3, 5), (1, 1, 4, 5), (1, 1, 4, 3))
    q, q_level = score.points(query.detach())
    k, k_level = score.points(key.detach())
    points = [None if t is None else t.requires_grad_() for t in (q, q_level, k, k_level)]
    parameters = [p.requires_grad_() for p in ops.pair_parameters(score, q)]
    mask = torch.randn(1, 1, 3, 4, requires_grad=True)
    rest = (value, torch.zeros(1, 1, 4, dtype=torch.bool), mask, torch.tensor(5), False, 0.25)
    operator = torch.ops.coneheads.triton_attention.default
    torch.library.opcheck(operator, (*points, parameters, score.spec(), *rest))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compile_whole(dynamic):
    def whole(query, key, value, mask):
        return attend(query, key, value, mask, enable_gqa=True)

    torch._dynamo.reset()
    compiled = torch.compile(whole, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch, length, keys in ((3, 7, 11), (2, 9, 6)) if dynamic else ((2, 7, 11),):
        tensors = leaves((batch, 4, length, 5), (batch, 2, keys, 5), (batch, 2, keys, 3))
        mask = torch.rand(batch, 1, length, keys) > 0.3
        got, want = compiled(*tensors, mask), whole(*tensors, mask)
        weight = torch.randn_like(want)
        assert torch.equal(got, want)
        for a, b in zip(*(torch.autograd.grad(out, tensors, weight) for out in (got, want)), strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_inference_mode():
    tensors = Shape("plain").tensors(torch.float32)
    want = attend(*tensors)
    with torch.inference_mode():
        assert torch.equal(attend(*tensors), want)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_casts_the_inputs(dtype):
    tensors = leaves((1, 1, 7, 8), (1, 1, 9, 8), (1, 1, 9, 5))

    def outcome():
        with torch.autocast("cpu", dtype=dtype):
            out = attend(*tensors)
            return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    halves = [t.to(dtype) for t in tensors]
    want = attend(*halves)
    expected = torch.autograd.grad(want.float().square().sum(), tensors)
    for a, b in zip(outcome(), (want, *expected), strict=True):
        assert torch.equal(a, b)


def test_second_derivative_is_refused_by_name():
    tensors = leaves((1, 1, 2, 3), (1, 1, 3, 3), (1, 1, 3, 2))
    grad = torch.autograd.grad(attend(*tensors).sum(), tensors[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"backend='triton' has no second derivative.*use backend='reference'"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [Shape("plain"), Shape("strided", layout="strided")], ids=str)
def test_inputs_are_not_written_into(shape):
    tensors = [t.requires_grad_() for t in shape.tensors(torch.float32)]
    for mask in (masks(shape)["boolean"]["attn_mask"], masks(shape)["rows_and_keys"]["attn_mask"].requires_grad_()):
        before = [t.detach().clone() for t in (*tensors, mask)]
        attend(*tensors, mask, enable_gqa=shape.gqa).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, mask), strict=True))


def test_backend_is_available_and_has_a_kernel_for_every_score():
    assert "triton" in coneheads.available_backends()
    tensors = [torch.randn(1, 1, 2, 3) for _ in range(3)]
    for score in VARIANTS.values():
        inputs = backends.Inputs(*tensors, None, False, 0.0, None, score)
        assert backends.choose("triton", inputs).name == "triton"
