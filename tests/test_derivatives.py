"""First and second derivatives against finite differences, and every hand-written derivative against autograd."""

import pytest
import torch

import coneheads
from coneheads.scores import BY_NAME, Penumbral, Umbral, resolve
from coneheads.scores.base import NO_LEVEL, differentiate_pair
from tests.cases import BACKEND_NAMES, SCORE_NAMES

VARIANTS = [
    *(resolve(name) for name in SCORE_NAMES),
    *(Penumbral(lift=lift, readout=readout) for lift in ("xi", "psi", "exp") for readout in ("height_sq", "distance")),
    *(Umbral(lift=lift, readout=readout) for lift in ("psi", "exp") for readout in ("height_sq", "distance")),
    Penumbral(lift="exp"),
    Penumbral(lift="psi", light_height=4.0),
    Penumbral(light_height=4.0),
    Umbral(lift="exp", radius=1.0),
    BY_NAME["half_space"](lift="exp"),
]
every_variant = pytest.mark.parametrize("score", VARIANTS, ids=repr)


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@every_variant
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_gradcheck_of_attention(score, backend):
    tensors = leaves((1, 2, 3, 4), (1, 1, 4, 4), (1, 1, 4, 2))
    mask = torch.tensor([[True, True, True, False], [True] * 4, [False] * 4])

    def out(*tensors):
        return coneheads.attention(*tensors, mask, score=score, backend=backend, enable_gqa=True, return_lse=True)[0]

    assert torch.autograd.gradcheck(out, tensors)


@every_variant
def test_gradgradcheck_of_the_reference(score):
    tensors = leaves((1, 1, 2, 3), (1, 1, 3, 3), (1, 1, 3, 2))
    assert torch.autograd.gradgradcheck(
        lambda *tensors: coneheads.attention(*tensors, score=score, backend="reference"), tensors
    )


@every_variant
def test_attention_scores_have_first_and_second_derivatives(score):
    tensors = leaves((1, 2, 2, 3), (1, 1, 3, 3))

    def scores(*tensors):
        return coneheads.attention_scores(*tensors, score=score, enable_gqa=True)

    assert torch.autograd.gradcheck(scores, tensors)
    assert torch.autograd.gradgradcheck(scores, tensors)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_gradients_flow_through_lse(backend):
    tensors = leaves((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2))

    def both(*tensors):
        return coneheads.attention(*tensors, score="umbral", backend=backend, return_lse=True)

    assert torch.autograd.gradcheck(both, tensors)


READOUTS = [
    *(resolve(name) for name in SCORE_NAMES),
    *(cls(readout=readout) for cls in (Penumbral, Umbral) for readout in ("height_sq", "distance")),
]


@pytest.mark.parametrize("score", READOUTS, ids=repr)
def test_hand_written_derivative_of_a_pair_is_that_of_autograd(score):
    score = score.for_size(8)
    size = 200
    query, key = torch.randn(2, 1, 1, size, 8, dtype=torch.float64).unbind(0)
    query[..., : size // 4, :] *= 0.05  # points with common ancestors
    key[..., : size // 4, :] *= 0.05
    (q, q_level), (k, k_level) = score.points(query), score.points(key)
    measure = q @ k.mT if score.measures == "product" else (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    levels = (NO_LEVEL, NO_LEVEL) if q_level is None else (q_level[..., :, None], k_level[..., None, :])
    parameters = {
        field: torch.rand(1, 1, 1, 1, dtype=torch.float64) + value * 0.5
        for field, value in score.parameters().items()
        if field in score.pair_fields
    }
    score = score.with_parameters(parameters)
    grad = torch.randn_like(measure)
    ours = score.pair_backward(grad, measure, *levels, score.pair_fields)
    want = differentiate_pair(score, grad, measure, *levels, score.pair_fields)
    assert type(score).pair_backward is not coneheads.scores.Score.pair_backward
    torch.testing.assert_close(ours.measure, want.measure)
    if q_level is not None:
        torch.testing.assert_close(ours.q_level, want.q_level)
        torch.testing.assert_close(ours.k_level, want.k_level)
    assert ours.parameters.keys() == want.parameters.keys() == set(score.pair_fields)
    for field in score.pair_fields:
        torch.testing.assert_close(ours.parameters[field].expand_as(grad), want.parameters[field])
