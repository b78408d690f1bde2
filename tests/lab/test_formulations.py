"""The other ways to write attention compute what the reference computes."""

import pytest
import torch

import coneheads
from coneheads.lab.speed import formulations
from coneheads.scores import resolve
from tests.cases import SCORE_NAMES, needs_compiler

COMPILED = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
SETTINGS = {
    "authors": [coneheads.Penumbral(), coneheads.Penumbral(light_height=2.5, gamma=0.7), coneheads.Umbral(),
                coneheads.Umbral(radius=0.4, gamma=2.0)],
    "plain": [resolve(name) for name in SCORE_NAMES],
}  # fmt: skip


def tensors(length=40, size=9):
    return [torch.randn(2, 2, length, size, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "score"), [(name, score) for name, scores in SETTINGS.items() for score in scores])
def test_dense_formulations_agree_with_the_reference(name, score, causal):
    leaves = tensors()
    truth = coneheads.attention(*leaves, is_causal=causal, score=score, backend="reference")
    got = getattr(formulations, name)(*leaves, score, causal)
    weight = torch.randn_like(truth)
    torch.testing.assert_close(got, truth, rtol=1e-6, atol=1e-6)
    for found, expected in zip(
        torch.autograd.grad(got, leaves, weight), torch.autograd.grad(truth, leaves, weight), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_direct_differences_agree_with_the_reference_under_a_mask(name):
    query, key, value = tensors()
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    truth = coneheads.attention(query, key, value, mask, score=name, backend="reference")
    torch.testing.assert_close(formulations.direct(query, key, value, resolve(name), mask), truth)


def test_the_penumbral_pairs_reach_every_case_of_the_paper():
    query, key, _ = (tensor.detach() for tensor in tensors(size=3))
    (q_x, q_y), (k_x, k_y) = (
        (features[..., :-1] * features[..., -1:].sigmoid(), features[..., -1:].sigmoid()) for features in (query, key)
    )
    sides = (1 - q_y.square()).sqrt(), (1 - k_y.square()).sqrt().mT
    distance = torch.cdist(q_x, k_x)
    exists, related = distance <= sides[0] + sides[1], distance <= (sides[0] - sides[1]).abs()
    assert related.any()
    assert (exists & ~related).any()
    assert not exists.all()


def test_the_authors_formulation_knows_the_cones_of_the_paper_alone():
    with pytest.raises(ValueError, match="laplacian"):
        formulations.authors(*tensors(), resolve("laplacian"))


def check_compiled(name, score, causal=False):
    query, key, value = (tensor.detach().float() for tensor in tensors(length=32, size=12))
    truth = coneheads.attention(query, key, value, is_causal=causal, score=score, backend="reference")
    compute = formulations.compiled_plain() if name == "compiled" else formulations.flex
    with torch.no_grad(), formulations.compiling_every_size():
        torch.testing.assert_close(compute(query, key, value, resolve(score), causal), truth, rtol=1e-4, atol=1e-4)


@needs_compiler
@COMPILED
@pytest.mark.parametrize("name", ["compiled", "flex"])
def test_compiled_formulations_agree_with_the_reference(name):
    check_compiled(name, "penumbral")


@pytest.mark.slow
@needs_compiler
@COMPILED
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", SCORE_NAMES)
def test_flex_agrees_with_the_reference_on_every_score(score, causal):
    check_compiled("flex", score, causal)
