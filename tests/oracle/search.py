"""Bisection, golden section, and the search for the lowest common ancestor that is built from them.

The ancestor search uses two facts about shadows, both of which the tests check on samples: an object moved
straight toward the light keeps shading what it shaded, and right next to the light the objects that shade a
given point form one interval around it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

Predicate = Callable[[np.ndarray], np.ndarray]
Function = Callable[[np.ndarray], np.ndarray]

GOLDEN = (np.sqrt(5) - 1) / 2
CANDIDATE_POSITIONS = 33


class Points(NamedTuple):
    """Points of the plane, one per entry."""

    position: np.ndarray
    altitude: np.ndarray

    def with_axis(self) -> "Points":
        """A trailing axis, so that one point meets all points of an outline."""
        return Points(np.asarray(self.position)[..., None], np.asarray(self.altitude)[..., None])


class ShadowCone(Protocol):
    """What the search asks of a cone.

    `nearest_root` is the altitude next to the light, None when the light is infinitely far; `farthest_leaf`
    an altitude so far from it that nothing in reach lies behind. `too_far_to_shade` is a sideways distance at
    which an object surely misses. `outline` is the set of points that must be shaded when v is the object,
    and `shades` says whether p lies behind w, seen from the light.
    """

    nearest_root: float | np.ndarray | None
    farthest_leaf: float

    def too_far_to_shade(self, altitude: np.ndarray) -> np.ndarray: ...

    def outline(self, v: Points) -> Points: ...

    def shades(self, w: Points, p: Points) -> np.ndarray: ...


def bisect(holds: Predicate, inside: np.ndarray, outside: np.ndarray, steps: int = 50) -> np.ndarray:
    """The last value on the way from `inside` (where `holds` is true) to `outside` (where it is not)."""
    inside, outside = np.broadcast_arrays(inside, outside)
    for _ in range(steps):
        middle = (inside + outside) / 2
        true_here = holds(middle)
        inside, outside = np.where(true_here, middle, inside), np.where(true_here, outside, middle)
    return inside


def golden_section_maximum(f: Function, low: np.ndarray, high: np.ndarray, steps: int = 45) -> np.ndarray:
    """Where a function that first rises and then falls is largest, between `low` and `high`."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    f_left, f_right = f(left), f(right)
    for _ in range(steps):
        go_left = f_left > f_right
        low, high = np.where(go_left, low, left), np.where(go_left, right, high)
        kept, f_kept = np.where(go_left, left, right), np.where(go_left, f_left, f_right)
        fresh = np.where(go_left, high - GOLDEN * (high - low), low + GOLDEN * (high - low))
        f_fresh = f(fresh)
        left, right = np.where(go_left, fresh, kept), np.where(go_left, kept, fresh)
        f_left, f_right = np.where(go_left, f_fresh, f_kept), np.where(go_left, f_kept, f_fresh)
    return (low + high) / 2


def lowest_common_ancestor_altitude(cone: ShadowCone, u: Points, v: Points) -> np.ndarray:
    """Altitude of the common ancestor farthest from the light; NaN where the search finds none."""
    outlines = [cone.outline(u), cone.outline(v)]
    first, last, nearest = _common_positions_next_to_the_light(cone, u, v, outlines)
    toward_light = np.sign(nearest - cone.farthest_leaf)
    exists = first <= last
    first, last = np.where(exists, first, 0.0), np.where(exists, last, 0.0)

    def depth_at(position):
        """How far from the light an object at this position may be and still shade both."""

        def shades_both(altitude):
            w = Points(position, altitude).with_axis()
            return cone.shades(w, outlines[0]).all(-1) & cone.shades(w, outlines[1]).all(-1)

        return -toward_light * bisect(shades_both, nearest, np.full_like(nearest, cone.farthest_leaf))

    # Many roots first, so that the refinement starts beside the best of them.
    candidates = np.linspace(first, last, CANDIDATE_POSITIONS)
    depths = np.stack([depth_at(position) for position in candidates])
    best = depths.argmax(0)
    rows = np.arange(best.size)
    low = candidates[np.maximum(best - 1, 0), rows]
    high = candidates[np.minimum(best + 1, CANDIDATE_POSITIONS - 1), rows]
    refined = depth_at(golden_section_maximum(depth_at, low, high))
    return np.where(exists, -toward_light * np.maximum(refined, depths.max(0)), np.nan)


def _common_positions_next_to_the_light(cone, u, v, outlines):
    """First and last position from which an object next to the light shades both, and its altitude."""
    nearest = _altitude_next_to_the_light(cone, u, v, outlines)
    too_far = cone.too_far_to_shade(nearest)
    edges = []
    for point, outline in zip((u, v), outlines, strict=True):

        def shades_it(position, outline=outline):
            return cone.shades(Points(position, nearest).with_axis(), outline).all(-1)

        edges.append([bisect(shades_it, point.position, point.position + side * too_far) for side in (-1, 1)])
    return np.maximum(edges[0][0], edges[1][0]), np.minimum(edges[0][1], edges[1][1]), nearest


def _altitude_next_to_the_light(cone, u, v, outlines):
    if cone.nearest_root is not None:
        return np.full_like(u.position, cone.nearest_root)
    altitude = np.maximum(u.altitude, v.altitude)
    for _ in range(200):
        w = Points(u.position, altitude).with_axis()
        enough = cone.shades(w, outlines[0]).all(-1) & cone.shades(w, outlines[1]).all(-1)
        if enough.all():
            break
        altitude = np.where(enough, altitude, 2 * altitude)
    return altitude


def lowest_light_height(cone_under: Callable[[np.ndarray], ShadowCone], u: Points, v: Points) -> np.ndarray:
    """The least light height under which u and v have a common ancestor, by bisection on the light itself."""

    def ancestor_exists(light_height):
        cone = cone_under(light_height)
        first, last, _ = _common_positions_next_to_the_light(cone, u, v, [cone.outline(u), cone.outline(v)])
        return first <= last

    too_low = np.maximum(u.altitude, v.altitude)
    high_enough = too_low + np.abs(u.position - v.position)
    while not (found := ancestor_exists(high_enough)).all():
        high_enough = np.where(found, high_enough, 2 * high_enough)
    return bisect(ancestor_exists, high_enough, too_low)
