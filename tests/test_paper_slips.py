"""Each slip of the paper (docs/math.md, last section): the printed form fails, the project's form holds.

`printed_*` functions are what the paper prints. They are kept here, and nowhere else, so that the reasons for
departing from it stay executable.
"""

import math

import numpy as np
import pytest
import torch

import coneheads
from coneheads.geometry import aggregation, hyperboloid, klein, lifts, poincare_ball, shadow_cones
from tests.oracle.brute_force import PenumbralInfinite
from tests.oracle.search import Points, lowest_common_ancestor_altitude


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def minkowski_square(point: torch.Tensor) -> torch.Tensor:
    """-1 on the hyperboloid, time last."""
    return (point[..., :-1] ** 2).sum(-1) - point[..., -1] ** 2


# ---- existence of a common cone ----


def printed_common_cone_exists(distance, u_height, v_height, light_height=1.0):
    """(D - s_u)^2 + v_d^2 < r^2, s_u = sqrt(r^2 - u_d^2)."""
    s_u = np.sqrt(light_height**2 - u_height**2)
    return (distance - s_u) ** 2 + v_height**2 < light_height**2


def pairs_below_the_light(count: int, farthest: float, seed: int = 0):
    """Heights uniform below the light, distances uniform up to `farthest` light heights."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0, farthest, count), rng.uniform(0.001, 0.999, count), rng.uniform(0.001, 0.999, count)


def our_common_cone_exists(distance, u_height, v_height):
    cone = shadow_cones.PenumbralCone(light_height=1.0)
    u = torch.stack([torch.zeros(len(distance), dtype=torch.float64), torch.from_numpy(u_height)], -1)
    v = torch.stack([torch.from_numpy(distance), torch.from_numpy(v_height)], -1)
    return (cone.lca_level(u, v) <= 1.0).numpy()


def test_printed_existence_test_denies_a_common_cone_to_three_percent_of_pairs():
    """2.9 % of pairs at distances up to 4 light heights; at distances up to 1 it is 12 %."""
    for farthest, least, most in ((4.0, 0.027, 0.032), (1.0, 0.11, 0.13)):
        distance, y_u, y_v = pairs_below_the_light(200_000, farthest)
        printed, ours = (
            printed_common_cone_exists(distance, y_u, y_v),
            our_common_cone_exists(distance, y_u, y_v),
        )
        assert least < np.mean(printed != ours) < most
        assert not np.any(printed & ~ours)  # it never invents a cone, it misses some


def test_our_existence_test_agrees_with_a_search_through_the_half_plane():
    distance, y_u, y_v = pairs_below_the_light(1000, 2.5)
    u, v = Points(np.zeros_like(distance), y_u), Points(distance, y_v)
    found = np.isfinite(lowest_common_ancestor_altitude(PenumbralInfinite(1.0), u, v))
    np.testing.assert_array_equal(our_common_cone_exists(distance, y_u, y_v), found)
    printed = printed_common_cone_exists(distance, y_u, y_v)
    assert np.sum(printed != found) > 10


def test_the_pairs_that_the_printed_test_denies_are_those_where_v_is_an_ancestor_of_u():
    distance, y_u, y_v = pairs_below_the_light(20_000, 2.5)
    denied = our_common_cone_exists(distance, y_u, y_v) & ~printed_common_cone_exists(distance, y_u, y_v)
    cone = shadow_cones.PenumbralCone(light_height=1.0)
    u = torch.from_numpy(np.stack([np.zeros_like(distance), y_u], -1))
    v = torch.from_numpy(np.stack([distance, y_v], -1))
    np.testing.assert_array_equal(denied, cone.precedes(v, u).numpy())


def test_printed_score_divides_by_zero_where_the_points_share_a_position():
    """At D = 0 the printed test sends a pair with v above u to the branch that divides by D^2."""
    y_u, y_v = 0.3, 0.6
    assert not printed_common_cone_exists(0.0, np.float64(y_u), np.float64(y_v))
    with pytest.raises(ZeroDivisionError):
        (y_u**2 - y_v**2) ** 2 / (4 * 0.0**2)
    logit = [math.log(y / (1 - y)) for y in (y_u, y_v)]
    q, k = (torch.tensor([[[0.0, f]]], dtype=torch.float64) for f in logit)
    assert coneheads.attention_scores(q, k, score="penumbral").item() == pytest.approx(-y_v, rel=1e-12)


# ---- lifts ----


def test_printed_xi_gives_a_vector_where_a_height_is_meant():
    f = random(5, 4)
    printed = 2.0 / (1 + torch.exp(-f))
    assert printed.shape == f.shape
    position, height = lifts.xi(f, 2.0)
    assert height.shape == f.shape[:-1]
    torch.testing.assert_close(height, printed[..., -1])
    torch.testing.assert_close(position, f[..., :-1] * height.unsqueeze(-1))
    moved_sideways = torch.cat([random(5, 3, seed=1), f[..., -1:]], -1)
    torch.testing.assert_close(lifts.xi(moved_sideways, 2.0)[1], height)


def test_printed_pseudopolar_point_is_off_the_hyperboloid():
    f = random(50, 5)
    printed = torch.cat([f[..., :-1] * torch.sinh(f[..., -1:]), torch.cosh(f[..., -1:])], -1)
    assert (minkowski_square(printed) + 1).abs().median() > 0.5
    ours = lifts.pseudopolar(f)
    torch.testing.assert_close(minkowski_square(ours), -torch.ones(50, dtype=torch.float64))
    origin = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(hyperboloid.distance(ours, origin), f[..., -1].abs())


# ---- models of hyperbolic space ----


def klein_points(*shape: int, seed: int = 0) -> torch.Tensor:
    """Points well inside the unit ball."""
    v = random(*shape, seed=seed)
    return v / (1.2 + v.norm(dim=-1, keepdim=True))


def test_printed_map_from_klein_to_hyperboloid_leaves_the_hyperboloid():
    p = klein_points(50, 3)
    with_time = torch.cat([p, torch.ones(50, 1, dtype=torch.float64)], -1)
    printed = with_time / (1 - p.norm(dim=-1, keepdim=True)).sqrt()
    assert (minkowski_square(printed) + 1).abs().min() > 1e-3
    ours = klein.to_hyperboloid(p)
    torch.testing.assert_close(minkowski_square(ours), -torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(hyperboloid.to_klein(ours), p)


def printed_poincare_distance(q, k):
    """arcosh(1 + 2 |q - k|^2 / ((1 - |q|^2) (1 - |k|)^2))."""
    gap_q, gap_k = 1 - (q**2).sum(-1), (1 - k.norm(dim=-1)) ** 2
    return torch.acosh(1 + 2 * ((q - k) ** 2).sum(-1) / (gap_q * gap_k))


def test_printed_poincare_distance_depends_on_the_order_of_its_arguments():
    q, k = klein_points(50, 3, seed=1), klein_points(50, 3, seed=2)
    asymmetry = (printed_poincare_distance(q, k) - printed_poincare_distance(k, q)).abs()
    assert asymmetry.median() > 0.05
    torch.testing.assert_close(poincare_ball.distance(q, k), poincare_ball.distance(k, q))


def test_our_poincare_distance_is_the_distance_on_the_hyperboloid():
    x, y = (lifts.pseudopolar(random(50, 4, seed=seed)) for seed in (1, 2))
    u, v = hyperboloid.to_poincare_ball(x), hyperboloid.to_poincare_ball(y)
    by_definition = torch.acosh(x[..., -1] * y[..., -1] - (x[..., :-1] * y[..., :-1]).sum(-1))
    torch.testing.assert_close(poincare_ball.distance(u, v), by_definition)
    assert (printed_poincare_distance(u, v) - by_definition).abs().median() > 0.05


# ---- Einstein midpoint ----


def test_printed_einstein_midpoint_is_the_number_one_for_every_set_of_points():
    points, weights = klein_points(6, 3), random(6).abs()
    gamma = 1 / (1 - (points**2).sum(-1)).sqrt()
    printed = (weights * gamma / (weights * gamma).sum()).sum()
    assert printed.item() == pytest.approx(1.0)


def test_our_einstein_midpoint_is_the_weighted_centre_on_the_hyperboloid():
    points, weights = klein_points(6, 3), torch.softmax(random(4, 6), -1)
    time = 1 / (1 - (points**2).sum(-1, keepdim=True)).sqrt()
    summed = weights @ torch.cat([points * time, time], -1)
    expected = summed[..., :-1] / summed[..., -1:]
    torch.testing.assert_close(aggregation.einstein_midpoint(points, weights), expected)


def test_our_einstein_midpoint_of_two_points_is_equally_far_from_both():
    points = klein_points(2, 3)
    midpoint = aggregation.einstein_midpoint(points, torch.full((1, 2), 0.5, dtype=torch.float64))
    to_both = hyperboloid.distance(klein.to_hyperboloid(points), klein.to_hyperboloid(midpoint))
    torch.testing.assert_close(to_both[0], to_both[1])


# ---- "reduces to the Laplacian kernel at equal heights" ----


def score_by_distance(score, f_d: float, height: float, distances: torch.Tensor) -> torch.Tensor:
    """Scores of a query above position 0 and keys of the same height at the given Euclidean distances."""
    query = torch.tensor([[[0.0, f_d]]], dtype=torch.float64)
    keys = torch.stack([distances / height, torch.full_like(distances, f_d)], -1).unsqueeze(0)
    return coneheads.attention_scores(query, keys, score=score)[0, 0]


def test_umbral_score_at_equal_heights_is_the_laplacian_kernel_exactly():
    distances = torch.linspace(0, 5, 200, dtype=torch.float64)
    for f_d in (-1.0, 0.0, 2.0):
        height = math.exp(f_d)
        scores = score_by_distance(coneheads.Umbral(radius=0.3), f_d, height, distances)
        torch.testing.assert_close(scores, -height - distances / (2 * math.sinh(0.3)), rtol=1e-13, atol=1e-13)


def test_penumbral_score_at_equal_heights_is_not_the_laplacian_kernel():
    """Its slope in the distance is steep for near pairs and flat just below the light."""
    distances = torch.linspace(0, 1.5, 151, dtype=torch.float64)
    scores = score_by_distance(coneheads.Penumbral(), -1.0, torch.sigmoid(torch.tensor(-1.0)).item(), distances)
    slopes = scores.diff() / distances.diff()
    assert slopes[0] / slopes[140] > 5


# ---- names and defaults ----


def test_half_space_baseline_uses_psi_by_default():
    score = coneheads.HalfSpaceDistance()
    assert score.lift == "psi"
    q, k = random(1, 3, 4), random(1, 3, 4, seed=1)
    (x_q, y_q), (x_k, y_k) = lifts.psi(q[0, 0]), lifts.psi(k[0, 0])
    chord_sq = ((x_q - x_k) ** 2).sum() + (y_q - y_k) ** 2
    expected = -torch.acosh(1 + chord_sq / (2 * y_q * y_k))
    torch.testing.assert_close(coneheads.attention_scores(q, k, score=score)[0, 0, 0], expected)


def test_light_height_and_ball_radius_have_their_own_names_and_the_values_of_the_appendix():
    assert coneheads.Penumbral().light_height == 1.0
    assert coneheads.Umbral().radius == 0.1
    assert not hasattr(coneheads.Penumbral(), "radius")
    assert not hasattr(coneheads.Umbral(), "light_height")


@pytest.mark.parametrize("score_type", [coneheads.Penumbral, coneheads.Umbral])
def test_default_readout_is_the_height_and_not_its_square(score_type):
    q, k = random(1, 5, 4), random(1, 5, 4, seed=1)
    assert score_type().readout == "height"
    by_default, squared = (
        coneheads.attention_scores(q, k, score=s) for s in (score_type(), score_type(readout="height_sq"))
    )
    torch.testing.assert_close(squared, -(by_default**2))
    assert not torch.allclose(by_default, squared)


def test_default_umbral_lift_does_not_divide_the_last_feature_by_the_size():
    f = torch.tensor([[[0.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)
    assert coneheads.Umbral().height_scale == 1.0
    assert coneheads.attention_scores(f, f, score="umbral").item() == pytest.approx(-math.exp(2.0))
