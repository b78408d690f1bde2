import torch

from coneheads.geometry import half_space, lifts
from tests.geometry.points import all_finite, extreme_features, half_space_points, normal, uniform


def test_exp_at_any_point_goes_the_length_of_its_vector():
    p, v = half_space_points(200, 4), normal(200, 4, seed=7, scale=2.0)
    torch.testing.assert_close(half_space.distance(p, half_space.exp(p, v)), v.norm(dim=-1), rtol=1e-11, atol=0)


def test_log_is_the_inverse_of_exp():
    p, v = half_space_points(200, 4), normal(200, 4, seed=7)
    torch.testing.assert_close(half_space.log(p, half_space.exp(p, v)), v, rtol=1e-10, atol=1e-10)
    q = half_space_points(200, 4, seed=9)
    torch.testing.assert_close(half_space.exp(p, half_space.log(p, q)), q, rtol=1e-10, atol=1e-10)


def test_geodesic_points_split_the_distance_in_proportion_inside_and_outside():
    u, v = half_space_points(100, 3, seed=1), half_space_points(100, 3, seed=2)
    d = half_space.distance(u, v)
    for t in (-0.5, 0.0, 0.3, 1.0, 1.5):
        w = half_space.geodesic(u, v, t)
        torch.testing.assert_close(half_space.distance(u, w), abs(t) * d, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(half_space.distance(w, v), abs(1 - t) * d, rtol=1e-10, atol=1e-10)


def test_geodesic_lies_on_a_semicircle_that_meets_the_boundary_at_right_angles():
    u = torch.tensor([0.0, 1.0], dtype=torch.float64)
    v = torch.tensor([2.0, 1.0], dtype=torch.float64)
    w = half_space.geodesic(u, v, uniform(20, low=-1.0, high=2.0))
    torch.testing.assert_close((w[:, 0] - 1).square() + w[:, 1].square(), torch.full((20,), 2.0).double())


def test_geodesic_takes_its_fraction_as_a_tensor_and_starts_exactly_at_u():
    u, v = half_space_points(5, 3, seed=1), half_space_points(5, 3, seed=2)
    t = torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]
    w = half_space.geodesic(u, v, t)
    assert w.shape == (4, 5, 3)
    assert torch.equal(w[0], u)
    torch.testing.assert_close(w[-1], v)


def test_distance_log_and_geodesic_are_finite_for_every_lifted_float32_feature():
    for lift in (lifts.psi, lifts.xi, lifts.exp):
        for exponent in (-38, -20, -8, -3, 0, 1, 2, 3, 8, 15, 20, 30):
            f = (extreme_features().double() * 10.0**exponent).float().requires_grad_()
            x, y = lift(f)
            p = torch.cat([x, y.unsqueeze(-1)], dim=-1)
            others = p.flip(0).detach()
            d, v = half_space.distance(p, others), half_space.log(p, others)
            assert all_finite(d, v, torch.autograd.grad(d.sum() + v.sum(), f)[0]), (lift.__name__, exponent)


def test_distance_keeps_its_gradient_between_extremely_far_points():
    u = torch.tensor([1e15, 1e-8], requires_grad=True)
    v = torch.tensor([-1e15, 1e-8])
    half_space.distance(u, v).backward()
    torch.testing.assert_close(u.grad, torch.tensor([1e-15, -1e8]), rtol=1e-5, atol=0)


def test_exp_log_and_geodesic_pass_gradcheck():
    u = half_space_points(4, 3, seed=1).requires_grad_()
    v = half_space_points(4, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(half_space.exp, (u, v))
    assert torch.autograd.gradcheck(half_space.log, (u, v))
    assert torch.autograd.gradcheck(lambda u, v: half_space.geodesic(u, v, 0.3), (u, v))


def test_geometry_compiles_to_one_graph():
    u, v = half_space_points(4, 3, seed=1), half_space_points(4, 3, seed=2)
    compiled = torch.compile(half_space.geodesic, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u, v, 0.3), half_space.geodesic(u, v, 0.3))
