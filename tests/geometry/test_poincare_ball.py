import math

import torch

from coneheads.geometry import hyperboloid, poincare_ball
from coneheads.geometry.shadow_cones import FinitePenumbralCone
from tests.geometry.points import all_finite, hyperboloid_points, uniform


def test_distance_matches_the_arcosh_formula():
    u, v = uniform(100, 3, seed=1, low=-0.5, high=0.5), uniform(100, 3, seed=2, low=-0.5, high=0.5)
    u_sq, v_sq, d_sq = u.square().sum(-1), v.square().sum(-1), (u - v).square().sum(-1)
    torch.testing.assert_close(poincare_ball.distance(u, v), torch.acosh(1 + 2 * d_sq / ((1 - u_sq) * (1 - v_sq))))


def test_aperture_matches_its_formula_and_is_a_right_angle_near_the_centre():
    x = uniform(100, 3, low=0.1, high=0.5)
    norm = x.norm(dim=-1)
    torch.testing.assert_close(poincare_ball.aperture(x, 0.05), torch.asin(0.05 * (1 - norm**2) / norm))
    near = torch.tensor([[0.0, 0.0], [0.01, 0.0]])
    torch.testing.assert_close(poincare_ball.aperture(near, 0.1), torch.full((2,), math.pi / 2))


def test_aperture_has_finite_gradients_everywhere():
    x = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [0.0990195, 0.0], [0.5, 0.0], [1.0, 0.0]], requires_grad=True)
    value = poincare_ball.aperture(x, 0.1)
    assert all_finite(value, torch.autograd.grad(value.sum(), x)[0])


def test_apex_lies_in_its_own_cone_and_the_cone_opens_away_from_the_centre():
    x = torch.tensor([0.3, 0.4])
    assert poincare_ball.in_cone(x, x, 0.1)
    assert poincare_ball.in_cone(x, 1.5 * x, 0.1)
    assert not poincare_ball.in_cone(x, 0.5 * x, 0.1)


def test_finite_penumbral_cones_are_the_cones_of_ganea():
    count = 20000
    for light_radius in (0.1, 0.5, 1.5):
        cone = FinitePenumbralCone(light_radius)
        u = hyperboloid_points(light_radius + uniform(count, seed=1, high=2.0), d=3, seed=1)
        v = hyperboloid_points(light_radius + uniform(count, seed=2, high=4.0), d=3, seed=2)
        # Half of the pairs in similar directions, so that both answers occur.
        v[: count // 2, :-1] = (3 * u + 0.3 * v)[: count // 2, :-1]
        v[:, -1] = (1 + v[:, :-1].square().sum(-1)).sqrt()
        margin = (cone.level(u) - cone.level(v) - cone.separation(u, v)).abs()
        member = poincare_ball.in_cone(
            hyperboloid.to_poincare_ball(u), hyperboloid.to_poincare_ball(v), math.sinh(light_radius) / 2
        )
        clear = margin > 1e-9
        assert torch.equal(member[clear], cone.precedes(u, v)[clear])
        assert member.float().mean() > 0.02
        assert clear.float().mean() > 0.99
