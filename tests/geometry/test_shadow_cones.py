"""The four cones are partial orders with a lowest common ancestor, with the symmetries of their light."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coneheads.geometry.shadow_cones import FinitePenumbralCone, FiniteUmbralCone, PenumbralCone, UmbralCone
from tests.geometry.points import all_finite, hyperboloid_points, normal, rotation, uniform

CONES = {
    "penumbral": PenumbralCone(light_height=1.0),
    "umbral": UmbralCone(radius=0.5),
    "finite_penumbral": FinitePenumbralCone(light_radius=0.2),
    "finite_umbral": FiniteUmbralCone(radius=0.5),
}
INFINITE, FINITE = ("penumbral", "umbral"), ("finite_penumbral", "finite_umbral")
HIGHEST_LEVEL = {"penumbral": 1.0, "umbral": math.inf, "finite_penumbral": 0.0, "finite_umbral": math.pi / 2}
TOLERANCE = 1e-9

unit_interval = st.floats(0, 1, allow_subnormal=False)
coordinate = st.floats(-1, 1, allow_subnormal=False)
three_points = st.lists(st.tuples(coordinate, coordinate, unit_interval), min_size=3, max_size=3)
exhaustive = settings(max_examples=150, deadline=None, derandomize=True)
every_cone = pytest.mark.parametrize("name", CONES)


def make_points(name, raw):
    """Points [n, 3] or [n, 4] from two numbers in [-1, 1] for the position, one in [0, 1] for the height."""
    raw = torch.as_tensor(raw, dtype=torch.float64)
    position, height = raw[:, :2], raw[:, 2:]
    if name in INFINITE:
        # 0.999 and not 1: at the light itself the level has an infinite slope, which turns 1e-16 into 1e-8.
        return torch.cat([position, 0.001 + 0.998 * height], dim=-1)
    direction = torch.cat([position, torch.full_like(height, 0.3)], dim=-1)
    direction = torch.nn.functional.normalize(direction, dim=-1)
    radius = 0.2 if name == "finite_penumbral" else 0.5
    rho = radius + 0.001 + 4 * height
    return torch.cat([direction * rho.sinh(), rho.cosh()], dim=-1)


def many_points(name, count, seed):
    """Points at all heights and near one another, so that many of them are ordered."""
    raw = torch.cat([uniform(count, 2, seed=seed, low=-1), uniform(count, 1, seed=seed + 1)], dim=-1)
    return make_points(name, raw)


def slack(cone, u, v):
    """>= 0 exactly where u precedes v."""
    return cone.level(u) - cone.level(v) - cone.separation(u, v)


def away_from_the_top(name, level):
    """Where the level changes smoothly with the height, so that rounding is not magnified."""
    return level < HIGHEST_LEVEL[name] - 1e-5


@every_cone
@exhaustive
@given(three_points)
def test_order_is_reflexive_antisymmetric_and_transitive(name, raw):
    cone, (u, v, w) = CONES[name], make_points(name, raw)
    assert cone.precedes(u, u)
    if cone.precedes(u, v) and cone.precedes(v, u):
        assert cone.separation(u, v) == 0
        torch.testing.assert_close(u, v, rtol=0, atol=1e-7)
    if cone.precedes(u, v) and cone.precedes(v, w):
        assert slack(cone, u, w) >= -1e-14


@every_cone
def test_order_is_transitive_on_many_triples(name):
    cone = CONES[name]
    p = many_points(name, 150, seed=1)
    before = cone.precedes(p[:, None], p[None, :])
    implied = (before.double() @ before.double()) > 0
    assert before.sum() > 200  # beside the 150 points themselves
    assert (slack(cone, p[:, None], p[None, :])[implied] >= -1e-14).all()


@every_cone
@exhaustive
@given(three_points)
def test_lca_is_above_both_and_is_a_point_itself_exactly_when_that_precedes_the_other(name, raw):
    cone, (u, v, _) = CONES[name], make_points(name, raw)
    level = cone.lca_level(u, v)
    assert level >= cone.level(u)
    assert level >= cone.level(v)
    assume(slack(cone, u, v).abs() > 1e-14)
    assert (level == cone.level(u)) == cone.precedes(u, v)
    if cone.precedes(u, v):
        assert torch.equal(cone.lca(u, v), u)
        assert torch.equal(cone.lca(v, u), u)


@every_cone
@exhaustive
@given(three_points)
def test_lca_point_has_the_lca_level_and_precedes_both(name, raw):
    cone, (u, v, _) = CONES[name], make_points(name, raw)
    level, lca = cone.lca_level(u, v), cone.lca(u, v)
    if level > HIGHEST_LEVEL[name]:
        assert lca.isnan().all()
        return
    assert all_finite(lca)
    assume(away_from_the_top(name, level))
    torch.testing.assert_close(cone.level(lca), level, rtol=0, atol=TOLERANCE)
    assert slack(cone, lca, u) >= -TOLERANCE
    assert slack(cone, lca, v) >= -TOLERANCE
    torch.testing.assert_close(cone.lca(v, u), lca, rtol=1e-7, atol=1e-7)


@every_cone
def test_no_common_ancestor_is_lower_than_the_lca(name):
    cone, p = CONES[name], many_points(name, 150, seed=3)
    before = cone.precedes(p[:, None], p[None, :])  # [ancestor, descendant]
    level = cone.lca_level(p[:, None], p[None, :])
    common = before[:, :, None] & before[:, None, :]  # [ancestor, u, v]
    assert (cone.level(p)[:, None, None] >= level - 1e-14)[common].all()


def test_penumbral_lca_exists_exactly_when_the_shadows_meet_below_the_light():
    p = many_points("penumbral", 200, seed=5)
    u, v = p[:, None], p[None, :]
    reach = (1 - p[:, -1].square()).sqrt()
    meets = (u - v)[..., :-1].norm(dim=-1) <= reach[:, None] + reach[None, :]
    exists = ~CONES["penumbral"].lca(u, v).isnan().any(-1)
    assert torch.equal(exists, meets)
    assert 0.05 < exists.double().mean() < 0.95


@every_cone
def test_height_from_level_inverts_level(name):
    cone, p = CONES[name], many_points(name, 100, seed=1)
    height = p[:, -1] if name in INFINITE else torch.asinh(p[:, :-1].norm(dim=-1))
    torch.testing.assert_close(cone.height_from_level(cone.level(p)), height, rtol=1e-9, atol=0)


def test_height_from_level_is_nan_for_levels_that_no_point_has():
    assert CONES["penumbral"].height_from_level(torch.tensor([-0.1, 1.1])).isnan().all()
    assert CONES["finite_penumbral"].height_from_level(torch.tensor([-1.5, 0.1])).isnan().all()
    assert CONES["finite_umbral"].height_from_level(torch.tensor([0.0, 1.6])).isnan().all()


def test_opposite_directions_have_no_common_ancestor():
    u = hyperboloid_points(torch.tensor([2.0], dtype=torch.float64))
    v = torch.cat([-u[:, :-1], u[:, -1:]], dim=-1)
    for name in FINITE:
        assert CONES[name].lca(u, v).isnan().all()


@pytest.mark.parametrize("name", INFINITE)
def test_infinite_cones_do_not_change_under_horizontal_translation(name):
    cone, u, v = CONES[name], many_points(name, 200, seed=1), many_points(name, 200, seed=3)
    shift = torch.tensor([0.7, -3.1, 0.0], dtype=torch.float64)
    torch.testing.assert_close(cone.lca_level(u + shift, v + shift), cone.lca_level(u, v))
    torch.testing.assert_close(cone.lca(u + shift, v + shift), cone.lca(u, v) + shift, equal_nan=True)


def test_infinite_cones_scale_with_the_half_space():
    u, v = many_points("penumbral", 200, seed=1), many_points("penumbral", 200, seed=3)
    for before, after in ((PenumbralCone(1.0), PenumbralCone(3.0)), (UmbralCone(0.5), UmbralCone(0.5))):
        torch.testing.assert_close(after.lca_level(3 * u, 3 * v), 3 * before.lca_level(u, v))
        torch.testing.assert_close(after.lca(3 * u, 3 * v), 3 * before.lca(u, v), equal_nan=True)
        assert torch.equal(after.precedes(3 * u, 3 * v), before.precedes(u, v))


@pytest.mark.parametrize("name", FINITE)
def test_finite_cones_do_not_change_under_rotation(name):
    cone, u, v = CONES[name], many_points(name, 200, seed=1), many_points(name, 200, seed=3)
    turn = torch.eye(4, dtype=torch.float64)
    turn[:3, :3] = rotation(3)
    torch.testing.assert_close(cone.lca_level(u @ turn, v @ turn), cone.lca_level(u, v))
    torch.testing.assert_close(cone.lca(u @ turn, v @ turn), cone.lca(u, v) @ turn, equal_nan=True)


@every_cone
def test_points_outside_the_domain_of_the_cone_count_as_on_its_edge(name):
    cone = CONES[name]
    if name == "penumbral":
        assert cone.level(torch.tensor([0.0, 0.0, 5.0])) == 1
    elif name in FINITE:
        level = cone.level(torch.tensor([0.0, 0.0, 0.0, 1.0]))
        torch.testing.assert_close(level, torch.tensor(HIGHEST_LEVEL[name]))


@every_cone
def test_levels_and_lca_have_finite_gradients_also_without_common_ancestor_and_for_equal_points(name):
    u, v = many_points(name, 100, seed=1).float(), many_points(name, 100, seed=3).float()
    u[:5] = v[:5]
    if name in FINITE:
        u[5:10, :-1] = -v[5:10, :-1]
        u[10:12, :-1] = 0
    u.requires_grad_()
    v.requires_grad_()
    cone = CONES[name]
    assert all_finite(*torch.autograd.grad(cone.lca_level(u, v).sum(), (u, v)))
    lca = cone.lca(u, v)
    total = torch.where(lca.isnan(), 0, lca).sum()
    assert all_finite(*torch.autograd.grad(total, (u, v)))


@every_cone
def test_lca_level_passes_gradcheck(name):
    cone = CONES[name]
    u = many_points(name, 5, seed=1).requires_grad_()
    v = many_points(name, 5, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(cone.lca_level, (u, v))


def test_parameters_may_be_tensors_that_broadcast_and_learn():
    u, v = many_points("penumbral", 6, seed=1), many_points("penumbral", 6, seed=3)
    for make in (PenumbralCone, UmbralCone):
        parameter = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
        level = make(parameter).lca_level(u, v)
        assert level.shape == (2, 6)
        torch.testing.assert_close(level[1], make(2.0).lca_level(u, v))
        assert make(parameter).lca(u, v).shape == (2, 6, 3)
        level.sum().backward()
        assert all_finite(parameter.grad)
    p = hyperboloid_points(2 + normal(6).abs())
    for make in (FinitePenumbralCone, FiniteUmbralCone):
        parameter = torch.tensor([[0.2], [0.5]], dtype=torch.float64, requires_grad=True)
        level = make(parameter).lca_level(p, p.flip(0))
        torch.testing.assert_close(level[1], make(0.5).lca_level(p, p.flip(0)))
        assert make(parameter).lca(p, p.flip(0)).shape == (2, 6, 4)
        level.sum().backward()
        assert all_finite(parameter.grad)


@every_cone
def test_cones_compile_to_one_graph(name):
    cone, u, v = CONES[name], many_points(name, 5, seed=1), many_points(name, 5, seed=3)
    compiled = torch.compile(lambda u, v: cone.lca(u, v), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u, v), cone.lca(u, v), equal_nan=True)
