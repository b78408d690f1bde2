import torch

from coneheads.geometry import klein
from tests.geometry.points import uniform


def test_distance_matches_the_arcosh_formula():
    u, v = uniform(100, 3, seed=1, low=-0.5, high=0.5), uniform(100, 3, seed=2, low=-0.5, high=0.5)
    gap = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
    torch.testing.assert_close(klein.distance(u, v), torch.acosh((1 - (u * v).sum(-1)) / gap.sqrt()))


def test_geodesics_are_straight_segments():
    u, v = uniform(100, 3, seed=1, low=-0.5, high=0.5), uniform(100, 3, seed=2, low=-0.5, high=0.5)
    between = u + 0.3 * (v - u)
    torch.testing.assert_close(
        klein.distance(u, between) + klein.distance(between, v), klein.distance(u, v), rtol=1e-12, atol=0
    )


def test_points_that_rounding_put_on_the_sphere_have_finite_distance():
    u = torch.tensor([0.6, 0.8], requires_grad=True)
    d = klein.distance(u, torch.tensor([-1.0, 0.0]))
    assert d.isfinite()
    assert torch.autograd.grad(d, u)[0].isfinite().all()
