import math

import mpmath
import pytest
import torch

from coneheads.geometry import hyperboloid, lifts
from tests.geometry.points import all_finite, extreme_features, hyperboloid_points, lorentz_boost, uniform


def test_minkowski_product_is_minus_cosh_of_the_distance():
    u = hyperboloid_points(uniform(100, seed=1, high=3.0), seed=1)
    v = hyperboloid_points(uniform(100, seed=2, high=3.0), seed=2)
    torch.testing.assert_close(-hyperboloid.minkowski_dot(u, v), hyperboloid.distance(u, v).cosh())


def test_distance_does_not_change_under_lorentz_transformations():
    u = hyperboloid_points(uniform(100, seed=1, high=3.0), seed=1)
    v = hyperboloid_points(uniform(100, seed=2, high=3.0), seed=2)
    boost = lorentz_boost(3, 1.2)
    torch.testing.assert_close(
        hyperboloid.distance(u @ boost.T, v @ boost.T), hyperboloid.distance(u, v), rtol=1e-11, atol=1e-11
    )


def _distance_with_many_digits(x_u, x_v):
    with mpmath.workdps(80):
        a, b = [mpmath.mpf(v) for v in x_u], [mpmath.mpf(v) for v in x_v]
        t_a, t_b = (mpmath.sqrt(1 + sum(v * v for v in p)) for p in (a, b))
        return float(mpmath.acosh(t_a * t_b - sum(v * w for v, w in zip(a, b, strict=True))))


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1.2e-7), (torch.float64, 2.3e-16)])
@pytest.mark.parametrize("radius", [0.01, 0.45, 0.55, 3.0, 10.0, 14.0])
def test_distance_keeps_its_digits_for_near_and_far_pairs_at_any_radius(dtype, eps, radius):
    x = hyperboloid_points(torch.full((5,), radius, dtype=torch.float64))[:, :-1]
    axis = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    along = axis * x[0].norm()
    # near along the radius, another direction, opposite, the origin, and along the radius on an axis
    other = torch.stack([x[0] * 1.01, x[1].roll(1), -x[2], x[3] * 0, along * 1.001])
    x[4] = along
    x, other = x.to(dtype), other.to(dtype)
    exact = [_distance_with_many_digits(a, b) for a, b in zip(x.tolist(), other.tolist(), strict=True)]
    exact = torch.tensor(exact, dtype=torch.float64)
    time = torch.zeros(5, 1, dtype=dtype)  # is not read
    got = hyperboloid.distance(torch.cat([x, time], -1), torch.cat([other, time], -1)).double()
    torch.testing.assert_close(got[1:], exact[1:], rtol=40 * eps, atol=0)
    # Rounding turns the directions of near points apart by eps, which sinh(radius) makes a distance.
    torch.testing.assert_close(got[0], exact[0], rtol=40 * eps, atol=2 * eps * math.sinh(radius))


def test_distance_has_the_right_gradient_at_the_origin():
    origin = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    other = hyperboloid_points(torch.tensor([2.0], dtype=torch.float64), d=2)[0]
    hyperboloid.distance(origin, other).backward()
    torch.testing.assert_close(origin.grad[:2], -torch.nn.functional.normalize(other[:2], dim=0))


def test_distance_is_finite_for_every_lifted_float32_feature():
    for exponent in (-38, -20, -8, -3, 0, 1, 2, 8, 15, 30):
        f = (extreme_features().double() * 10.0**exponent).float().requires_grad_()
        p = lifts.pseudopolar(f)
        d = hyperboloid.distance(p, p.flip(0).detach())
        assert all_finite(d, torch.autograd.grad(d.sum(), f)[0]), exponent
