"""Laws of the scores themselves, over random points: symmetry, invariances, and what an ancestor does to a score."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coneheads
from coneheads.scores import resolve
from tests.cases import SCORE_NAMES

seeds = st.integers(0, 2**31 - 1)
scales = st.sampled_from([0.01, 0.3, 1.0, 4.0])
laws = settings(max_examples=25, deadline=None)


def features(seed, scale, count=2):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(count, 1, 6, 5, generator=generator, dtype=torch.float64)).unbind(0)


def scores(query, key, score):
    return coneheads.attention_scores(query, key, score=score)


@pytest.mark.parametrize("name", SCORE_NAMES)
@laws
@given(seeds, scales)
def test_score_is_symmetric(name, seed, scale):
    query, key = features(seed, scale)
    torch.testing.assert_close(scores(query, key, name), scores(key, query, name).mT, rtol=1e-11, atol=1e-13)


@laws
@given(seeds, scales, st.floats(-50, 50))
@pytest.mark.parametrize("name", ["laplacian", "penumbral", "umbral", "half_space"])
def test_horizontal_translation_changes_no_score(name, seed, scale, shift):
    query, key = features(seed, scale)

    def moved(f):  # by the same vector: the lifts multiply positions by the height, so it is divided out before
        if name == "laplacian":
            return f + shift
        height = f[..., -1:].sigmoid() if name == "penumbral" else f[..., -1:].exp()
        return torch.cat([f[..., :-1] + shift / height, f[..., -1:]], -1)

    torch.testing.assert_close(scores(moved(query), moved(key), name), scores(query, key, name), rtol=1e-7, atol=1e-7)


@laws
@given(seeds, scales, st.floats(0.1, 10))
def test_dilation_scales_heights_and_keeps_distances(seed, scale, factor):
    query, key = features(seed, scale)
    step = torch.tensor([0.0] * 4 + [1.0], dtype=torch.float64) * torch.tensor(factor).log().double()
    dilated = [f + step for f in (query, key)]  # psi: y and with it x = f y are multiplied by the factor
    torch.testing.assert_close(scores(*dilated, "umbral"), scores(query, key, "umbral") * factor, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores(*dilated, "half_space"), scores(query, key, "half_space"), rtol=1e-6, atol=1e-9)
    # penumbral: the light is raised by the same factor, and xi multiplies every height by it
    raised = scores(query, key, coneheads.Penumbral(light_height=factor))
    torch.testing.assert_close(raised, scores(query, key, "penumbral") * factor, rtol=1e-9, atol=0)


@laws
@given(seeds, scales)
@pytest.mark.parametrize(
    "name", ["laplacian", "penumbral", "umbral", "half_space", "hyperboloid", "dot", "penumbral_finite"]
)
def test_rotation_of_the_positions_changes_no_score(name, seed, scale):
    query, key = features(seed, scale)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    turned = [torch.cat([f[..., :-1] @ rotation, f[..., -1:]], -1) for f in (query, key)]
    torch.testing.assert_close(scores(*turned, name), scores(query, key, name), rtol=1e-9, atol=1e-9)


@laws
@given(seeds, scales)
@pytest.mark.parametrize("name", ["penumbral", "umbral", "penumbral_finite", "umbral_finite"])
def test_no_pair_scores_above_either_of_its_points_alone(name, seed, scale):
    """The lowest common ancestor is above both points, so no score exceeds that of a point with itself."""
    query, key = features(seed, scale)
    pair = scores(query, key, name)
    own = [scores(f, f, name).diagonal(dim1=-2, dim2=-1) for f in (query, key)]
    assert (pair <= torch.minimum(own[0][..., :, None], own[1][..., None, :]) + 1e-12).all()


@laws
@given(seeds)
@pytest.mark.parametrize("name", ["penumbral", "umbral"])
def test_score_with_a_descendant_is_that_of_the_ancestor_alone(name, seed):
    (above,) = features(seed, 1.0, count=1)
    height = above[..., -1:].sigmoid() if name == "penumbral" else above[..., -1:].exp()
    deep = above[..., -1:] - 4
    deep_height = deep.sigmoid() if name == "penumbral" else deep.exp()
    below = torch.cat([above[..., :-1] * height / deep_height, deep], -1)  # same position, much lower
    own = scores(above, above, name).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(scores(above, below, name).diagonal(dim1=-2, dim2=-1), own, rtol=1e-12, atol=0)


def test_umbral_at_equal_heights_is_the_laplacian_kernel():
    query, key = features(0, 1.0)
    query, key = (torch.cat([f[..., :-1], torch.zeros_like(f[..., -1:])], -1) for f in (query, key))
    sinh = torch.tensor(0.1, dtype=torch.float64).sinh().item()
    kernel = scores(query, key, coneheads.Laplacian(gamma=1 / (2 * sinh)))
    torch.testing.assert_close(scores(query, key, "umbral"), kernel - 1)


def test_gamma_is_the_inverse_temperature():
    query, key = features(0, 1.0)
    for name in ("penumbral", "umbral", "penumbral_finite", "umbral_finite", "laplacian"):
        warm, cold = (scores(query, key, type(resolve(name))(gamma=gamma)) for gamma in (1.0, 3.0))
        torch.testing.assert_close(cold, 3 * warm)


@pytest.mark.parametrize("lift", ["xi", "psi", "exp", None])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_equal_tokens_are_equal_points_wherever_they_lie(name, lift):
    """To the last bit: some functions of PyTorch round the last elements of a tensor in another way than the others."""
    try:
        score = resolve(name) if lift is None else dataclasses.replace(resolve(name), lift=lift)
    except (TypeError, ValueError):
        pytest.skip(f"{name} has no lift {lift}")
    tokens = 2 * torch.randn(1, 1, 999, 16)
    whole = score.for_size(16).points(tokens)
    parts = [score.for_size(16).points(few.clone()) for few in tokens.split(3, 2)]
    for together, apart in zip(whole, zip(*parts, strict=True), strict=True):
        assert (together is None) == (apart[0] is None)
        assert together is None or torch.equal(together, torch.cat(apart, 2))
