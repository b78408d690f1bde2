"""The four models are one space: every conversion keeps distances, and every round trip returns."""

import itertools

import pytest
import torch

from coneheads.geometry import half_space, hyperboloid, klein, poincare_ball
from tests.geometry.points import half_space_points

MODELS = {
    "half_space": half_space,
    "hyperboloid": hyperboloid,
    "klein": klein,
    "poincare_ball": poincare_ball,
}


def convert(points, source, target):
    return points if source == target else getattr(MODELS[source], f"to_{target}")(points)


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MODELS, 2)))
def test_distances_survive_two_conversions_and_points_return(d, first, second):
    u, v = half_space_points(200, d, seed=1), half_space_points(200, d, seed=2)
    expected = half_space.distance(u, v)
    in_first = [convert(p, "half_space", first) for p in (u, v)]
    in_second = [convert(p, first, second) for p in in_first]
    torch.testing.assert_close(MODELS[first].distance(*in_first), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(MODELS[second].distance(*in_second), expected, rtol=1e-10, atol=1e-10)
    back = convert(in_second[0], second, first)
    torch.testing.assert_close(back, in_first[0], rtol=1e-10, atol=1e-10)


def test_all_ways_to_a_model_lead_to_the_same_point():
    p = half_space_points(100)
    for middle, target in itertools.permutations(list(MODELS)[1:], 2):
        direct = convert(p, "half_space", target)
        around = convert(convert(p, "half_space", middle), middle, target)
        torch.testing.assert_close(around, direct, rtol=1e-10, atol=1e-10)


def test_o_is_the_centre_of_every_model():
    o = torch.tensor([0.0, 0.0, 1.0])
    assert half_space.to_klein(o).tolist() == [0, 0, 0]
    assert half_space.to_poincare_ball(o).tolist() == [0, 0, 0]
    assert half_space.to_hyperboloid(o).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gap", [1e-3, 1e-7, 1e-10])
def test_distances_of_near_points_keep_their_relative_digits(name, gap):
    # Two points whose coordinates differ by `gap` in one direction, against the metric of the model there.
    p = convert(half_space_points(50, 3, seed=3), "half_space", name)
    step = torch.zeros_like(p)
    step[:, 0] = gap
    q = p + step
    if name == "hyperboloid":
        q[:, -1] = (1 + q[:, :-1].square().sum(-1)).sqrt()
    got = MODELS[name].distance(p, q)
    shift = q[:, 0] - p[:, 0]  # what rounding left of the gap
    middle = (p[:, :3] + q[:, :3]) / 2
    r_sq = middle.square().sum(-1)
    if name == "half_space":
        metric = 1 / middle[:, -1]
    elif name == "hyperboloid":
        metric = (1 - middle[:, 0].square() / (1 + r_sq)).sqrt()
    elif name == "klein":
        metric = (1 / (1 - r_sq) + middle[:, 0].square() / (1 - r_sq).square()).sqrt()
    else:
        metric = 2 / (1 - r_sq)
    # The tolerance is the change of the metric, gap^2, or rounding of the coordinates, eps / gap.
    tolerance = 1e4 * gap**2 + 1e-12 / gap if name == "klein" else 1e3 * gap**2 + 1e-13 / gap
    torch.testing.assert_close(got, metric * shift, rtol=max(tolerance, 1e-9), atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_distance_of_a_point_to_itself_is_exactly_zero_with_gradient_zero(name):
    p = convert(half_space_points(20), "half_space", name).requires_grad_()
    d = MODELS[name].distance(p, p.detach())
    assert (d == 0).all()
    assert (torch.autograd.grad(d.sum(), p)[0] == 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_distances_and_conversions_pass_gradcheck(name):
    u = convert(half_space_points(6, 3, seed=1), "half_space", name).requires_grad_()
    v = convert(half_space_points(6, 3, seed=2), "half_space", name).requires_grad_()
    assert torch.autograd.gradcheck(MODELS[name].distance, (u, v))
    for target in MODELS:
        if target != name:
            assert torch.autograd.gradcheck(lambda p, target=target: convert(p, name, target), u)


@pytest.mark.parametrize("name", MODELS)
def test_distances_broadcast(name):
    u = convert(half_space_points(6), "half_space", name)
    pairs = MODELS[name].distance(u[:, None], u[None, :])
    assert pairs.shape == (6, 6)
    torch.testing.assert_close(pairs, pairs.T, rtol=1e-12, atol=1e-15)
