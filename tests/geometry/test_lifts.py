import mpmath
import pytest
import torch

from coneheads.geometry import half_space, hyperboloid, lifts
from tests.geometry.points import all_finite, extreme_features, normal

LIFTS = {
    "psi": lifts.psi,
    "xi": lifts.xi,
    "exp": lifts.exp,
    "polar": lifts.polar,
    "pseudopolar": lambda f: (lifts.pseudopolar(f),),
}


def test_psi_and_xi_match_their_formulas():
    f = normal(50, 4)
    x, y = lifts.psi(f, height_scale=0.5)
    torch.testing.assert_close(y, (0.5 * f[:, -1]).exp())
    torch.testing.assert_close(x, f[:, :-1] * y[:, None])
    x, y = lifts.xi(f, light_height=3.0, height_scale=0.5)
    torch.testing.assert_close(y, 3 / (1 + (-0.5 * f[:, -1]).exp()))
    torch.testing.assert_close(x, f[:, :-1] * y[:, None])


def test_exp_matches_the_naive_formula_and_lies_at_distance_norm_from_o():
    f = normal(200, 4)
    n, f_d = f.norm(dim=-1), f[:, -1]
    x, y = lifts.exp(f)
    torch.testing.assert_close(y, 1 / (n.cosh() - f_d * n.sinh() / n), rtol=1e-12, atol=0)
    torch.testing.assert_close(x, f[:, :-1] / (n / n.tanh() - f_d)[:, None], rtol=1e-12, atol=1e-15)
    o = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(half_space.distance(o, torch.cat([x, y[:, None]], -1)), n, rtol=1e-12, atol=0)


def test_exp_multiplies_the_last_feature_by_height_scale():
    f = normal(20, 4)
    scaled = torch.cat([f[:, :-1], 0.25 * f[:, -1:]], dim=-1)
    for a, b in zip(lifts.exp(f, height_scale=0.25), lifts.exp(scaled), strict=True):
        torch.testing.assert_close(a, b)


def _exp_with_many_digits(f):
    with mpmath.workdps(60):
        f = [mpmath.mpf(v) for v in f]
        n = mpmath.sqrt(sum(v * v for v in f))
        ratio = mpmath.sinh(n) / n
        y = 1 / (mpmath.cosh(n) - f[-1] * ratio)
        return [float(v * ratio * y) for v in f[:-1]] + [float(y)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_exp_keeps_its_digits_straight_up_straight_down_and_near_zero(dtype, tolerance):
    directions = normal(10, 3)
    directions[0] = torch.tensor([0.0, 0.0, 1.0])
    directions[1] = torch.tensor([0.0, 0.0, -1.0])
    directions[2] = torch.tensor([1e-9, 0.0, 1.0])
    directions[3] = torch.tensor([1e-9, 0.0, -1.0])
    for norm in (1e-10, 1e-3, 0.0999, 0.1001, 1.0, 10.0, 19.9):
        f = (norm * torch.nn.functional.normalize(directions, dim=-1)).to(dtype)
        x, y = lifts.exp(f)
        exact = torch.tensor([_exp_with_many_digits(row) for row in f.tolist()], dtype=torch.float64)
        got = torch.cat([x, y[:, None]], -1).double()
        torch.testing.assert_close(got, exact, rtol=tolerance, atol=0)


def test_exp_has_the_exact_gradient_at_zero():
    f = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda f: torch.cat([v.view(-1) for v in lifts.exp(f)]), f)
    torch.testing.assert_close(jacobian, torch.eye(3, dtype=torch.float64))


def test_pseudopolar_points_lie_on_the_hyperboloid_and_negative_radius_flips_the_direction():
    f = normal(50, 4)
    point = lifts.pseudopolar(f)
    torch.testing.assert_close(hyperboloid.minkowski_dot(point, point), -torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(lifts.pseudopolar(-f), point)
    direction, radius = lifts.polar(f)
    assert (radius >= 0).all()
    torch.testing.assert_close(direction.norm(dim=-1), torch.ones(50, dtype=torch.float64))


def test_polar_radius_moves_with_the_last_feature_at_zero():
    f = torch.tensor([1.0, 2.0, 0.0], requires_grad=True)
    lifts.polar(f)[1].backward()
    assert f.grad[-1] == 1


@pytest.mark.parametrize("name", LIFTS)
def test_lifts_are_finite_in_value_and_gradient_for_every_scale_of_float32(name):
    for exponent in range(-45, 39):
        f = (extreme_features().double() * 10.0**exponent).clamp(-3e38, 3e38).float().requires_grad_()
        outputs = LIFTS[name](f)
        gradient = torch.autograd.grad(sum(o.sum() for o in outputs), f)[0]
        assert all_finite(*outputs, gradient), exponent


def test_lifts_saturate_at_their_limits_in_every_dtype():
    for dtype in (torch.float32, torch.float64):
        huge = torch.tensor([1e30, -1e30, 1e30], dtype=dtype)
        x, y = lifts.psi(huge)
        assert x.tolist() == [torch.tensor(v, dtype=dtype).item() for v in (1e15, -1e15)]
        torch.testing.assert_close(y.log(), torch.tensor(20.0, dtype=dtype))
        torch.testing.assert_close(lifts.polar(huge)[1], torch.tensor(40.0, dtype=dtype))
        up = torch.tensor([0.0, 1e30], dtype=dtype)
        torch.testing.assert_close(lifts.exp(up)[1].log(), torch.tensor(20.0, dtype=dtype))


def test_parameters_may_be_tensors_and_receive_gradients():
    f = normal(2, 5, 4)
    light_height = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    height_scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x, y = lifts.xi(f, light_height, height_scale)
    assert x.shape == (2, 5, 3)
    assert y.shape == (2, 5)
    (x.sum() + y.sum()).backward()
    assert all_finite(light_height.grad, height_scale.grad)


@pytest.mark.parametrize("name", LIFTS)
def test_lifts_pass_gradcheck(name):
    f = normal(6, 3)
    f[0] *= 0.01  # the branch of exp near O
    assert torch.autograd.gradcheck(LIFTS[name], f.requires_grad_())


@pytest.mark.parametrize("name", LIFTS)
def test_lifts_compile_to_one_graph(name):
    f = normal(6, 3).float()
    compiled = torch.compile(LIFTS[name], fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(f), LIFTS[name](f), strict=True):
        torch.testing.assert_close(got, expected)
