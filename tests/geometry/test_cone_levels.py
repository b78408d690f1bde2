import math

import mpmath
import pytest
import torch

from coneheads.geometry import shadow_cones
from tests.geometry.points import all_finite, normal, uniform

FEATURES = [-80.0, -20.0, -1.0, 0.0, 1.0, 20.0, 36.0]


def _tensor(values):
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def test_penumbral_level_of_the_xi_lift_keeps_its_digits_in_value_and_slope():
    f_d = _tensor(FEATURES).requires_grad_()
    level = shadow_cones.penumbral_level_xi(f_d, 2.5)
    slope = torch.autograd.grad(level.sum(), f_d)[0]
    with mpmath.workdps(120):
        s = [1 / (1 + mpmath.exp(-mpmath.mpf(f))) for f in FEATURES]
        root = [mpmath.sqrt(1 - v**2) for v in s]
        exact = _tensor(2.5 * (1 - r) for r in root)
        exact_slope = _tensor(2.5 * v**2 * (1 - v) / r for v, r in zip(s, root, strict=True))
    torch.testing.assert_close(level.detach(), exact, rtol=1e-14, atol=0)
    # Beyond f_d = 36 float64 has no digit of 1 - sigmoid left, which autograd's slope of sigmoid uses.
    torch.testing.assert_close(slope[:-2], exact_slope[:-2], rtol=1e-14, atol=0)
    torch.testing.assert_close(slope, exact_slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penumbral_levels_have_finite_gradients_at_the_extremes(dtype):
    f_d = torch.tensor([-1e30, -1e4, -100.0, 0.0, 17.0, 90.0, 100.0, 1e4, 1e30], dtype=dtype, requires_grad=True)
    light_height = torch.tensor(1.5, dtype=dtype, requires_grad=True)
    level = shadow_cones.penumbral_level_xi(f_d, light_height)
    assert all_finite(level, *torch.autograd.grad(level.sum(), (f_d, light_height)))
    y = torch.tensor([0.0, 1e-30, 1.0, 1.4999999, 1.5, 2.0, 1e17], dtype=dtype, requires_grad=True)
    level = shadow_cones.penumbral_level(y, light_height)
    assert all_finite(level, *torch.autograd.grad(level.sum(), (y, light_height)))
    assert (level[-3:] == 1.5).all()


def test_penumbral_level_of_a_height_does_not_cancel_and_inverts():
    y = torch.logspace(-12, 0, 50, dtype=torch.float64)
    level = shadow_cones.penumbral_level(y, 1.0)
    torch.testing.assert_close(shadow_cones.penumbral_height_sq(level, 1.0).sqrt(), y, rtol=1e-14, atol=0)
    torch.testing.assert_close(level[0], y[0].square() / 2, rtol=1e-14, atol=0)


def test_the_two_penumbral_level_functions_agree():
    f_d = normal(100, scale=3.0)
    y = 2.0 * torch.sigmoid(f_d)
    torch.testing.assert_close(
        shadow_cones.penumbral_level_xi(f_d, 2.0), shadow_cones.penumbral_level(y, 2.0), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("radius", [1e-3, 0.2, 2.0])
def test_finite_levels_keep_their_digits_from_the_light_to_the_boundary(radius):
    excess = [1e-14, 1e-6, 1e-2, 1.0, 10.0, 50.0, 300.0]
    with mpmath.workdps(400):
        r = mpmath.mpf(radius)
        penumbral = _tensor(-mpmath.acos(mpmath.tanh(r) / mpmath.tanh(r + mpmath.mpf(e))) for e in excess)
        umbral = _tensor(mpmath.asin(mpmath.sinh(r) / mpmath.sinh(r + mpmath.mpf(e))) for e in excess)
    got = shadow_cones.finite_penumbral_level(_tensor(excess), radius)
    torch.testing.assert_close(got, penumbral, rtol=1e-13, atol=0)
    got = shadow_cones.finite_umbral_level(_tensor(excess), radius)
    torch.testing.assert_close(got, umbral, rtol=1e-13, atol=0)


@pytest.mark.parametrize("level", [shadow_cones.finite_penumbral_level, shadow_cones.finite_umbral_level])
def test_finite_levels_have_finite_gradients_at_the_extremes(level):
    excess = torch.tensor([0.0, 1e-45, 1e-30, 1e-8, 1.0, 50.0, 100.0, 1e4, 1e30], requires_grad=True)
    radius = torch.tensor(0.2, requires_grad=True)
    value = level(excess, radius)
    assert all_finite(value, *torch.autograd.grad(value.sum(), (excess, radius)))


def test_lowest_light_is_the_least_height_under_which_the_pair_has_a_common_ancestor():
    d, y_u, y_v = uniform(500, seed=1, high=3.0), uniform(500, seed=2), uniform(500, seed=3)
    height = shadow_cones.lowest_light_height_sq(d**2, y_u**2, y_v**2).sqrt()

    def common_ancestor(h):
        level = [shadow_cones.penumbral_level(y, h) for y in (y_u, y_v)]
        return (shadow_cones.lca_level(*level, d) <= h) & (torch.maximum(y_u, y_v) <= h)

    assert common_ancestor(height * (1 + 1e-6)).all()
    assert not common_ancestor(height * (1 - 1e-6)).any()


def test_the_two_penumbral_branches_meet_at_the_light():
    h, y_u, y_v = 1.0, uniform(100, seed=1), uniform(100, seed=2)
    d = (h**2 - y_u**2).sqrt() + (h**2 - y_v**2).sqrt()
    torch.testing.assert_close(
        shadow_cones.lowest_light_height_sq(d**2, y_u**2, y_v**2), torch.ones_like(d), rtol=1e-12, atol=0
    )


def test_lowest_light_is_finite_for_coincident_and_tiny_distances():
    d_sq = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e30])
    y_u_sq, y_v_sq = torch.tensor(1.0), torch.tensor([[0.25], [1.0], [0.0]])
    inputs = [t.clone().requires_grad_() for t in (d_sq, y_u_sq, y_v_sq)]
    value = shadow_cones.lowest_light_height_sq(*inputs)
    assert all_finite(value, *torch.autograd.grad(value.sum(), inputs))
    zeros = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    value = shadow_cones.lowest_light_height_sq(*zeros)
    assert all_finite(value, *torch.autograd.grad(value.sum(), zeros))


def test_umbral_height_inverts_umbral_level_for_numbers_and_tensors():
    y = uniform(20, low=0.1, high=3.0)
    for radius in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        level = shadow_cones.umbral_level(y, radius)
        torch.testing.assert_close(level, y * math.sinh(0.1))
        torch.testing.assert_close(shadow_cones.umbral_height(level, radius), y)


@pytest.mark.parametrize(
    "function",
    [
        shadow_cones.penumbral_level,
        shadow_cones.penumbral_level_xi,
        shadow_cones.umbral_level,
        shadow_cones.umbral_height,
        shadow_cones.finite_penumbral_level,
        shadow_cones.finite_umbral_level,
    ],
)
def test_levels_pass_gradcheck_in_point_and_parameter(function):
    value = uniform(8, low=0.2, high=0.9).requires_grad_()
    parameter = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (value, parameter))


def test_pair_functions_pass_gradcheck():
    a, b, c = (uniform(8, seed=s, low=0.2).requires_grad_() for s in range(3))
    assert torch.autograd.gradcheck(shadow_cones.lca_level, (a, b, c))
    assert torch.autograd.gradcheck(shadow_cones.lowest_light_height_sq, (a, b, c))
