import math

import pytest
import torch

from coneheads.geometry import primitives
from tests.geometry.points import all_finite, normal, uniform


def _gradient(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def test_safe_sqrt_has_value_and_gradient_zero_at_zero_and_below():
    x = torch.tensor([-1.0, 0.0, 4.0])
    assert primitives.safe_sqrt(x.requires_grad_()).tolist() == [0.0, 0.0, 2.0]
    assert _gradient(primitives.safe_sqrt, x.detach()).tolist() == [0.0, 0.0, 0.25]


def test_safe_sqrt_gives_the_same_values_with_and_without_gradient():
    x = uniform(1000, high=3.0).float()
    with_gradient = primitives.safe_sqrt(x.clone().requires_grad_())
    assert torch.equal(primitives.safe_sqrt(x), with_gradient)


def test_safe_sqrt_lets_nan_through_on_both_paths():
    x = torch.tensor([math.nan])
    assert primitives.safe_sqrt(x).isnan().all()
    assert primitives.safe_sqrt(x.requires_grad_()).isnan().all()


def test_safe_norm_has_finite_first_and_second_derivative_at_zero():
    x = torch.zeros(3, requires_grad=True)
    (first,) = torch.autograd.grad(primitives.safe_norm(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [0.0, 0.0, 0.0]
    assert all_finite(second)


def test_unit_vectors_have_norm_one_at_any_scale_above_the_floor():
    for scale in (1e-11, 1e-3, 1.0, 1e15):
        x = normal(20, 4).float() * scale
        torch.testing.assert_close(primitives.unit(x).norm(dim=-1), torch.ones(20), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30, 1e-13, 1e-12, 3e-12, 1.0, 1e15])
def test_unit_has_finite_gradients_even_under_a_large_upstream_gradient(scale):
    x = normal(20, 4).float() * scale
    assert all_finite(_gradient(lambda x: primitives.unit(x) * 1e17 * torch.arange(4.0), x))


def test_unit_passes_gradcheck_and_gradgradcheck():
    x = normal(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(primitives.unit, x)
    assert torch.autograd.gradgradcheck(primitives.unit, x)


def test_torch_asinh_is_right_in_value_but_loses_its_gradient_where_safe_asinh_does_not():
    x = torch.tensor([-1e30, -1e20, -1e15, -1e-20, 1e-20, 1e-4, 1.0, 1e15, 1e20, 1e30])
    true_value = torch.tensor([math.asinh(v) for v in x.tolist()])
    true_slope = torch.tensor([1 / math.hypot(v, 1) for v in x.tolist()])
    torch.testing.assert_close(torch.asinh(x), true_value, rtol=3e-7, atol=0)
    torch.testing.assert_close(primitives.safe_asinh(x), true_value, rtol=3e-7, atol=0)
    assert _gradient(torch.asinh, x)[-1] == 0
    torch.testing.assert_close(_gradient(primitives.safe_asinh, x), true_slope, rtol=3e-7, atol=0)


def test_positive_asinh_agrees_with_asinh():
    x = torch.logspace(-30, 17, 200, dtype=torch.float64)
    torch.testing.assert_close(primitives.positive_asinh(x), torch.asinh(x), rtol=1e-14, atol=0)
    torch.testing.assert_close(_gradient(primitives.positive_asinh, x), _gradient(torch.asinh, x), rtol=1e-12, atol=0)
    assert all_finite(_gradient(primitives.positive_asinh, torch.tensor([0.0, 1e-45, 1e18, 1e30])))


def test_angle_from_chord_matches_the_angle_and_keeps_small_ones():
    angle = torch.tensor([1e-150, 1e-12, 1e-3, 0.5, 1.5, 3.0, 3.14], dtype=torch.float64)
    chord_sq = (2 * torch.sin(angle / 2)).square()
    torch.testing.assert_close(primitives.angle_from_chord_sq(chord_sq), angle, rtol=1e-12, atol=0)


def test_angle_from_chord_has_gradient_zero_at_both_ends_and_finite_everywhere():
    below_four = torch.nextafter(torch.tensor(4.0), torch.tensor(0.0)).item()
    gradient = _gradient(primitives.angle_from_chord_sq, torch.tensor([0.0, 4.0, 5.0, below_four, 1e-45, 1.0]))
    assert gradient[:3].tolist() == [0.0, 0.0, 0.0]
    assert all_finite(gradient)
    torch.testing.assert_close(gradient[-1], torch.tensor(1 / math.sqrt(3)))


@pytest.mark.parametrize(
    ("function", "true", "slope"),
    [
        (
            lambda n: primitives.sinhc(n * n),
            lambda n: math.sinh(n) / n,
            lambda n: (n * math.cosh(n) - math.sinh(n)) / n**2,
        ),
        (
            primitives.asinhc,
            lambda n: math.asinh(n) / n,
            lambda n: 1 / (n * math.hypot(n, 1)) - math.asinh(n) / n**2,
        ),
    ],
)
def test_quotients_meet_their_series_in_value_and_slope(function, true, slope):
    n = torch.tensor([0.0098, 0.0102, 0.098, 0.102, 1.0, 3.0], dtype=torch.float64)
    exact = torch.tensor([true(v) for v in n.tolist()], dtype=torch.float64)
    torch.testing.assert_close(function(n), exact, rtol=1e-15, atol=0)
    exact_slope = torch.tensor([slope(v) for v in n.tolist()], dtype=torch.float64)
    torch.testing.assert_close(_gradient(function, n), exact_slope, rtol=1e-10, atol=0)
    assert function(torch.zeros(1)).item() == 1


def test_ball_gap_stays_positive_on_the_sphere():
    assert primitives.ball_gap(torch.tensor([0.6, 0.8])) > 0
