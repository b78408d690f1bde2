"""The law of the levels against physics: light, shadow, and a search over many roots.

`brute_force` knows only what it means to stand between the light and a point. The formulas, and the project's
cones, have to give the same order and the same lowest common ancestor.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mpmath import mpf

from coneheads.geometry import shadow_cones
from tests.oracle import closed_form
from tests.oracle.brute_force import (
    PenumbralFinite,
    PenumbralInfinite,
    UmbralFinite,
    UmbralInfinite,
    precedes,
)
from tests.oracle.search import Points, ShadowCone, lowest_common_ancestor_altitude, lowest_light_height

TOLERANCE = 1e-6
# Order and existence are yes or no: pairs closer than this to the border are left to rounding.
BORDER = 1e-6
PER_FAMILY = 40


@dataclass(frozen=True)
class Setting:
    """One cone three times: its physics, the level that the formulas give an altitude, the project's."""

    cone: ShadowCone
    level: Callable[[mpf], mpf]
    project_cone: shadow_cones.ShadowCone
    highest_level: float  # no ancestor lies above it
    least_altitude: float
    greatest_altitude: float
    widest: float  # greatest useful distance between positions

    def levels(self, altitudes: np.ndarray) -> np.ndarray:
        return np.array([float(self.level(mpf(a))) if np.isfinite(a) else np.nan for a in altitudes])

    def lca_levels(self, u: Points, v: Points) -> np.ndarray:
        distance = np.abs(u.position - v.position)
        triples = zip(self.levels(u.altitude), self.levels(v.altitude), distance, strict=True)
        return np.array([closed_form.level_of_lca(*triple) for triple in triples], dtype=float)


def penumbral_infinite(h: float) -> Setting:
    def level(y):
        return closed_form.penumbral_level(y, mpf(h))

    return Setting(PenumbralInfinite(h), level, shadow_cones.PenumbralCone(h), h, 0.01 * h, 0.999 * h, 2.2 * h)


def umbral_infinite(r: float) -> Setting:
    def level(y):
        return y * np.sinh(r)

    return Setting(UmbralInfinite(r), level, shadow_cones.UmbralCone(r), np.inf, 0.05, 4.0, 3.0)


def penumbral_finite(big_r: float) -> Setting:
    def level(rho):
        return closed_form.penumbral_finite_level(rho, mpf(big_r))

    return Setting(
        PenumbralFinite(big_r),
        level,
        shadow_cones.FinitePenumbralCone(big_r),
        0.0,
        big_r + 0.01,
        big_r + 3.0,
        np.pi,
    )


def umbral_finite(r: float) -> Setting:
    def level(rho):
        return closed_form.umbral_finite_level(rho, mpf(r))

    return Setting(UmbralFinite(r), level, shadow_cones.FiniteUmbralCone(r), np.pi / 2, r + 0.01, r + 3.0, np.pi)


SETTINGS = [
    pytest.param(penumbral_infinite(1.0), id="penumbral-light_height=1"),
    pytest.param(penumbral_infinite(2.5), id="penumbral-light_height=2.5"),
    pytest.param(umbral_infinite(0.1), id="umbral-radius=0.1"),
    pytest.param(umbral_infinite(1.5), id="umbral-radius=1.5"),
    pytest.param(penumbral_finite(0.2), id="penumbral_finite-light_radius=0.2"),
    pytest.param(penumbral_finite(1.0), id="penumbral_finite-light_radius=1"),
    pytest.param(umbral_finite(0.1), id="umbral_finite-radius=0.1"),
    pytest.param(umbral_finite(1.0), id="umbral_finite-radius=1"),
]
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def pairs_of_every_family(setting: Setting, seed: int = 0) -> tuple[Points, Points]:
    """Far, near, ancestor-like, level, near-coincident and coincident pairs, `PER_FAMILY` each."""
    rng = np.random.default_rng(seed)
    n = PER_FAMILY

    def altitudes():
        return rng.uniform(setting.least_altitude, setting.greatest_altitude, n)

    def apart(widest):
        return rng.uniform(0, widest, n)

    a, b = altitudes(), altitudes()
    families = [
        (altitudes(), altitudes(), apart(setting.widest)),
        (altitudes(), altitudes(), apart(0.2 * setting.widest)),
        (np.minimum(a, b), np.maximum(a, b), apart(0.03)),  # one almost behind the other
        (a, a, apart(setting.widest)),
        (a, b, apart(1e-5)),
        (a, b, apart(1e-9)),
        (a, b, np.zeros(n)),
        (a, a, np.zeros(n)),  # the same point twice
    ]
    start = rng.uniform(-1, 1, n * len(families))
    altitude_u, altitude_v, distance = (np.concatenate(column) for column in zip(*families, strict=True))
    return Points(start, altitude_u), Points(start + distance, altitude_v)


@functools.cache
def searched_ancestors(setting: Setting) -> tuple[Points, Points, np.ndarray]:
    """The pairs, and the altitude of each one's lowest common ancestor (NaN: none found)."""
    u, v = pairs_of_every_family(setting)
    return u, v, lowest_common_ancestor_altitude(setting.cone, u, v)


@every_setting
def test_search_finds_the_ancestor_that_the_law_of_levels_gives(setting):
    u, v, found = searched_ancestors(setting)
    predicted = setting.lca_levels(u, v)
    predicted_to_exist = predicted <= setting.highest_level
    # The umbral ball that touches the light is out of the search's reach by 1e-9, hence by its root in angle.
    near_border = np.abs(predicted - setting.highest_level) < 1e-3
    np.testing.assert_array_equal(np.isfinite(found)[~near_border], predicted_to_exist[~near_border])
    both = np.isfinite(found) & predicted_to_exist
    assert both.sum() > 4 * PER_FAMILY
    levels_found = setting.levels(found[both])
    assert np.max(np.abs(levels_found - predicted[both])) < TOLERANCE


def as_project_points(setting: Setting, points: Points) -> torch.Tensor:
    """Half-space points [N, 2], or hyperboloid points [N, 3] where the light is at the origin."""
    position, altitude = torch.from_numpy(points.position), torch.from_numpy(points.altitude)
    if isinstance(setting.cone, PenumbralInfinite | UmbralInfinite):
        return torch.stack([position, altitude], -1)
    sinh, cosh = torch.sinh(altitude), torch.cosh(altitude)
    return torch.stack([torch.cos(position) * sinh, torch.sin(position) * sinh, cosh], -1)


def as_points(setting: Setting, points: torch.Tensor) -> Points:
    if isinstance(setting.cone, PenumbralInfinite | UmbralInfinite):
        return Points(points[..., 0].numpy(), points[..., 1].numpy())
    x, y = points[..., 0].numpy(), points[..., 1].numpy()
    return Points(np.arctan2(y, x), np.arcsinh(np.hypot(x, y)))


@every_setting
def test_ancestor_of_the_project_is_the_one_found_by_search(setting):
    u, v, found = searched_ancestors(setting)
    ancestor = setting.project_cone.lca(as_project_points(setting, u), as_project_points(setting, v))
    ours = as_points(setting, ancestor)
    near_border = np.abs(setting.lca_levels(u, v) - setting.highest_level) < 1e-3
    np.testing.assert_array_equal(np.isfinite(ours.altitude)[~near_border], np.isfinite(found)[~near_border])
    both = np.isfinite(ours.altitude) & np.isfinite(found)
    assert np.max(np.abs(setting.levels(ours.altitude[both]) - setting.levels(found[both]))) < TOLERANCE
    # It also stands where it should: moved a little toward the light, it shades both.
    nearest = 1e3 if setting.cone.nearest_root is None else setting.cone.nearest_root
    nearer = Points(ours.position[both], ours.altitude[both] + 1e-4 * (nearest - ours.altitude[both]))
    for point in (u, v):
        shaded = precedes(setting.cone, nearer, Points(point.position[both], point.altitude[both]))
        assert shaded[np.abs(ours.altitude[both] - nearest) > 1e-2].all()


@every_setting
def test_order_of_the_project_is_the_order_of_the_shadows(setting):
    u, v = pairs_of_every_family(setting, seed=1)
    slack = setting.levels(u.altitude) - setting.levels(v.altitude) - np.abs(u.position - v.position)
    decided = np.abs(slack) > BORDER
    ours = setting.project_cone.precedes(as_project_points(setting, u), as_project_points(setting, v)).numpy()
    np.testing.assert_array_equal(ours[decided], precedes(setting.cone, u, v)[decided])


@every_setting
def test_shadow_holds_exactly_the_points_that_are_close_enough_for_their_levels(setting):
    """u precedes v  <=>  D(u, v) <= level(u) - level(v)."""
    u, v = pairs_of_every_family(setting, seed=1)
    for ancestor, descendant in ((u, v), (v, u)):
        slack = setting.levels(ancestor.altitude) - setting.levels(descendant.altitude)
        slack -= np.abs(u.position - v.position)
        decided = np.abs(slack) > BORDER
        shaded = precedes(setting.cone, ancestor, descendant)
        assert 0 < shaded[decided].sum() < decided.sum()
        np.testing.assert_array_equal(shaded[decided], slack[decided] > 0)


@every_setting
def test_a_point_precedes_itself(setting):
    u, _ = pairs_of_every_family(setting)
    assert precedes(setting.cone, u, u).all()


@every_setting
def test_moving_toward_the_light_keeps_the_shadow(setting):
    """The search bisects on the altitude; this is what makes that right."""
    rng = np.random.default_rng(2)
    w, v = pairs_of_every_family(setting, seed=2)
    nearest = 10.0 if setting.cone.nearest_root is None else setting.cone.nearest_root
    nearer = Points(w.position, w.altitude + rng.uniform(0.01, 1, w.altitude.size) * (nearest - w.altitude))
    shaded = precedes(setting.cone, w, v)
    assert shaded.any()
    assert precedes(setting.cone, nearer, v)[shaded].all()


@every_setting
def test_positions_that_shade_a_point_from_next_to_the_light_form_one_interval(setting):
    """The search bisects for the ends of this interval."""
    v, _ = pairs_of_every_family(setting, seed=3)
    nearest = 5.0 if setting.cone.nearest_root is None else setting.cone.nearest_root
    altitude = np.full_like(v.altitude, nearest)
    reach = setting.cone.too_far_to_shade(altitude)
    for side in (-1, 1):
        steps = np.linspace(0, 1, 101)
        candidates = [Points(v.position + side * step * reach, altitude) for step in steps]
        shaded = np.stack([precedes(setting.cone, w, v) for w in candidates])
        assert shaded[0].all()
        assert not shaded[-1].any()
        assert (np.diff(shaded.astype(int), axis=0) <= 0).all()


@pytest.mark.parametrize("h", [1.0, 2.5])
def test_pairs_without_ancestor_are_given_the_lowest_light_that_would_make_one(h):
    rng = np.random.default_rng(4)
    n = 300
    u = Points(rng.uniform(-1, 1, n), rng.uniform(0.001, 0.999, n) * h)
    altitude_v = np.where(np.arange(n) % 4 == 0, u.altitude, rng.uniform(0.001, 0.999, n) * h)
    v = Points(u.position + rng.uniform(0, 4, n) * h, altitude_v)
    apart = penumbral_infinite(h).lca_levels(u, v) > h
    assert apart.sum() > 150
    u, v = (Points(p.position[apart], p.altitude[apart]) for p in (u, v))
    searched = lowest_light_height(PenumbralInfinite, u, v)
    distances = v.position - u.position
    formula = [
        float(closed_form.penumbral_lca_height(mpf(d), mpf(a), mpf(b), mpf(h)))
        for d, a, b in zip(distances, u.altitude, v.altitude, strict=True)
    ]
    assert np.max(np.abs(searched - formula)) < TOLERANCE * h
    assert np.min(searched) > h


def test_height_of_the_ancestor_is_read_from_its_level_as_the_formulas_say():
    """The read-out sqrt(L (2h - L)) and L / sinh r against heights found by search."""
    for setting, height_of_lca, parameter in (
        (penumbral_infinite(1.7), closed_form.penumbral_lca_height, 1.7),
        (umbral_infinite(0.4), closed_form.umbral_lca_height, 0.4),
    ):
        u, v = pairs_of_every_family(setting, seed=5)
        searched = lowest_common_ancestor_altitude(setting.cone, u, v)
        found = np.isfinite(searched)
        pairs = zip(np.abs(u.position - v.position), u.altitude, v.altitude, strict=True)
        heights = [height_of_lca(mpf(d), mpf(a), mpf(b), mpf(parameter)) for d, a, b in pairs]
        formula = np.array(heights, dtype=float)
        assert np.max(np.abs(searched - formula)[found] / formula[found]) < TOLERANCE


@pytest.mark.parametrize("big_r", [0.2, 1.0])
def test_ganea_entailment_cones_are_the_penumbral_ones_of_a_ball_of_light(big_r):
    """Ganea's order in the Poincare ball: angle(x, y) <= arcsin(K (1 - |x|^2) / |x|), K = sinh(R) / 2."""
    setting = penumbral_finite(big_r)
    w, v = pairs_of_every_family(setting, seed=7)
    x, y = np.tanh(w.altitude / 2), np.tanh(v.altitude / 2)
    product = x * y * np.cos(w.position - v.position)
    gap = np.sqrt(np.maximum(x**2 + y**2 - 2 * product, 1e-300))
    denominator = x * gap * np.sqrt(1 + x**2 * y**2 - 2 * product)
    cosine = (product * (1 + x**2) - x**2 * (1 + y**2)) / denominator
    angle_at_w = np.arccos(np.clip(cosine, -1, 1))
    aperture = np.arcsin(np.sinh(big_r) / 2 * (1 - x**2) / x)
    decided = (np.abs(angle_at_w - aperture) > BORDER) & (gap > BORDER)
    np.testing.assert_array_equal((angle_at_w <= aperture)[decided], precedes(setting.cone, w, v)[decided])


def test_eight_points_of_a_ball_are_enough_to_decide_whether_it_lies_in_the_shadow():
    for setting in (umbral_finite(0.1), umbral_finite(1.0)):
        w, v = pairs_of_every_family(setting, seed=6)
        turns = np.broadcast_to(np.linspace(0, 2 * np.pi, 400), (w.position.size, 400))
        surface = setting.cone._circle(v.with_axis(), turns)
        all_of_it = setting.cone.shades(w.with_axis(), surface).all(-1)
        outline = precedes(setting.cone, w, v)
        slack = setting.levels(w.altitude) - setting.levels(v.altitude) - np.abs(w.position - v.position)
        decided = np.abs(slack) > 1e-4
        np.testing.assert_array_equal(outline[decided], all_of_it[decided])
