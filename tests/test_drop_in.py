"""`coneheads.attention` stands where `F.scaled_dot_product_attention` stood: same arguments, same meaning."""

import inspect

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import coneheads
from tests.cases import BACKEND_NAMES, SCORE_NAMES, SHAPES, masks

every_backend = pytest.mark.parametrize("backend", BACKEND_NAMES)


def test_signature_is_the_documented_one():
    signature = inspect.signature(coneheads.attention)
    assert (
        str(signature)
        .replace("'", "")
        .startswith(
            "(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, "
            "is_causal: bool = False, *, score: Score | str = penumbral, enable_gqa: bool = False, "
            "backend: str = auto, return_lse: bool = False)"
        )
    )


@every_backend
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dot_product_gives_the_numbers_of_sdpa(shape, backend):
    tensors = [t.detach().requires_grad_() for t in shape.tensors(torch.float64)]
    for label, mask in masks(shape).items():
        ours = coneheads.attention(*tensors, **mask, score="dot", enable_gqa=shape.gqa, backend=backend)
        if "attn_mask" in mask and mask["attn_mask"].is_floating_point():  # theirs wants 2 dimensions and one dtype
            mask = {"attn_mask": torch.atleast_2d(mask["attn_mask"]).double()}
        theirs = sdpa(*tensors, **mask, enable_gqa=shape.gqa)
        if label in ("boolean", "float_with_infinity"):  # SDPA gives NaN or 0 for a row that is masked whole
            ours, theirs = ours[..., 1:, :], theirs[..., 1:, :]
        torch.testing.assert_close(ours, theirs)
        if ours.numel() and label not in ("boolean", "float_with_infinity"):
            weight = torch.randn_like(ours)
            for a, b in zip(*(torch.autograd.grad(o, tensors, weight) for o in (ours, theirs)), strict=True):
                torch.testing.assert_close(a, b)


LEADING = [
    ((), (), ()),
    ((3,), (3,), (3,)),
    ((2, 3), (2, 3), (2, 3)),
    ((5, 2, 3), (5, 2, 3), (5, 2, 3)),
    ((2, 3), (1, 3), (1, 3)),
    ((2, 3), (3,), (3,)),
    ((2, 3), (2, 1), (2, 1)),
    ((1, 3), (2, 3), (2, 3)),
    ((4, 1, 3), (1, 2, 3), (1, 1, 3)),
]


@every_backend
@pytest.mark.parametrize("lead", LEADING, ids=str)
@pytest.mark.parametrize("name", ["dot", "penumbral"])
def test_leading_sizes_broadcast_as_in_sdpa(lead, backend, name):
    query, key, value = (
        torch.randn(*sizes, rows, size, dtype=torch.float64)
        for sizes, rows, size in zip(lead, (4, 6, 6), (8, 8, 5), strict=True)
    )
    want = sdpa(query, key, value)
    out, lse = coneheads.attention(query, key, value, score=name, backend=backend, return_lse=True)
    assert out.shape == want.shape
    assert lse.shape == want.shape[:-1]
    if name == "dot":
        torch.testing.assert_close(out, want)


@every_backend
@pytest.mark.parametrize(
    "shape", [(6,), (4, 6), (1, 6), (4, 1), (3, 4, 6), (2, 1, 4, 6), (5, 1, 1, 4, 6), (1, 2, 3, 1, 1)]
)
def test_masks_of_every_shape_broadcast_with_several_batch_sizes(shape, backend):
    query, key, value = (torch.randn(5, 2, 3, rows, 8, dtype=torch.float64) for rows in (4, 6, 6))
    mask = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        coneheads.attention(query, key, value, mask, score="dot", backend=backend), sdpa(query, key, value, mask)
    )
    allowed = mask > -1
    ours = coneheads.attention(query, key, value, allowed, score="dot", backend=backend)
    theirs = sdpa(query, key, value, allowed).nan_to_num(0)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", SCORE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_scores_train_wherever_sdpa_does(name, dtype):
    tensors = [torch.randn(2, 4, 10, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = coneheads.attention(*tensors, None, 0.1, True, score=name)
    out.sum().backward()
    assert out.dtype == dtype
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() and t.grad.abs().sum() > 0 for t in tensors)


@every_backend
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_grouped_queries_are_repeated_keys(name, backend):
    query, key, value = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((6, 5), (2, 7), (2, 7)))
    grouped = coneheads.attention(query, key, value, score=name, enable_gqa=True, backend=backend)
    repeated = [t.repeat_interleave(3, 1) for t in (key, value)]
    torch.testing.assert_close(grouped, coneheads.attention(query, *repeated, score=name, backend=backend))


@pytest.mark.parametrize("shape", [(), (4,), (4, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (2, 4, 1, 1)], ids=str)
@every_backend
def test_parameters_per_head_and_per_batch(shape, backend):
    query, key, value = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    gamma, height = torch.rand(2, *shape, dtype=torch.float64).add(0.5).unbind(0)
    got = coneheads.attention(query, key, value, score=coneheads.Penumbral(height, gamma), backend=backend)
    full = [t[:, None, None] if t.dim() == 1 else t for t in (height, gamma)]
    full = [t.expand(2, 4, 1, 1) for t in full]
    for b in range(2):
        for h in range(4):
            score = coneheads.Penumbral(full[0][b, h].item(), full[1][b, h].item())
            want = coneheads.attention(query[b, h], key[b, h], value[b, h], score=score, backend=backend)
            torch.testing.assert_close(got[b, h], want)
