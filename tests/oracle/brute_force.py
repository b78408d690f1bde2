"""The four shadow cones from their physical definition, and their ancestors by search.

Nothing here knows a level, an aperture or a formula for the ancestor. Each cone answers one question, "does
w stand between the light and this point?"; `search` asks it of very many candidate roots w.

Two points and the light are mirror-symmetric about the plane through them, so the plane suffices. A point of
it is a pair (position, altitude): (x, y) with the light above in the infinite settings, (angle, distance from
the light) in the finite ones. Arrays broadcast; a whole batch of pairs is searched at once.
"""

from dataclasses import dataclass

import numpy as np

from .search import Points, ShadowCone, golden_section_maximum

# Lengths that are equal in exact arithmetic (a point and its own shadow) must not differ by rounding.
ROUNDING = 1e-13


def precedes(cone: ShadowCone, w: Points, v: Points) -> np.ndarray:
    """Is w an ancestor of v: does w's shadow hold all of v?"""
    return cone.shades(w.with_axis(), cone.outline(v)).all(-1)


@dataclass(frozen=True)
class PenumbralInfinite:
    """Light: everything at or above `light_height` in the upper half-plane; objects are points."""

    light_height: float | np.ndarray  # one light for all pairs, or one for each
    farthest_leaf: float = 0.0

    @property
    def nearest_root(self) -> float | np.ndarray:
        return self.light_height

    def too_far_to_shade(self, altitude: np.ndarray) -> np.ndarray:
        return 2 * altitude  # a semicircle rises no farther sideways than its height

    def outline(self, v: Points) -> Points:
        return v.with_axis()

    def shades(self, w: Points, p: Points) -> np.ndarray:
        """The geodesic from p through w, continued beyond w, reaches the light.

        Geodesics are vertical lines and semicircles centred on y = 0. With the centre at w + `to_apex`, equal
        radii to p and w give `to_apex = (y_w^2 - y_p^2 - dx^2) / (2 dx)`. Beyond w the semicircle rises only
        if its apex is ahead.
        """
        light_height = np.asarray(self.light_height)[..., None]
        dx = w.position - p.position
        vertical = dx == 0
        safe_dx = np.where(vertical, 1.0, dx)
        to_apex = (w.altitude**2 - p.altitude**2 - dx**2) / (2 * safe_dx)
        apex_height = np.hypot(to_apex, w.altitude)
        apex_is_ahead = to_apex * np.sign(safe_dx) >= 0
        along_semicircle = apex_is_ahead & (apex_height >= light_height)
        same_point = vertical & (w.altitude == p.altitude)
        along_vertical = w.altitude > p.altitude
        below_light = w.altitude <= light_height
        return below_light & (np.where(vertical, along_vertical, along_semicircle) | same_point)


@dataclass(frozen=True)
class UmbralInfinite:
    """Light falls straight down from infinity; every point is a ball of hyperbolic `radius`.

    That ball is the Euclidean one with centre (x, y cosh r) and radius y sinh r.
    """

    radius: float
    nearest_root: None = None
    farthest_leaf: float = 0.0

    def too_far_to_shade(self, altitude: np.ndarray) -> np.ndarray:
        return 2 * altitude * np.sinh(self.radius)  # the width of its ball

    def outline(self, v: Points) -> Points:
        """16 points of the ball's surface, the leftmost and rightmost exactly among them."""
        v = v.with_axis()
        turn = np.arange(16) * (np.pi / 8)
        ball_radius = v.altitude * np.sinh(self.radius)
        x = v.position + ball_radius * np.cos(turn)
        return Points(x, v.altitude * np.cosh(self.radius) + ball_radius * np.sin(turn))

    def shades(self, w: Points, p: Points) -> np.ndarray:
        """The ray straight up from p meets w's ball."""
        ball_radius = w.altitude * np.sinh(self.radius)
        dx = np.abs(p.position - w.position)
        half_chord_sq = ball_radius**2 - dx**2
        slack = ROUNDING * (ball_radius + np.abs(p.position) + np.abs(w.position))
        top = w.altitude * np.cosh(self.radius) + np.sqrt(np.maximum(half_chord_sq, 0))
        # Near the rim the top of the ball is infinitely steep: rounding in dx grows to its square root.
        steepness = np.sqrt(slack * (ball_radius + slack))
        return (dx <= ball_radius + slack) & (p.altitude <= top + 2 * steepness)


@dataclass(frozen=True)
class PenumbralFinite:
    """Light: the ball of hyperbolic radius `light_radius` about the origin; objects are points outside it."""

    light_radius: float
    farthest_leaf: float = 12.0

    @property
    def nearest_root(self) -> float:
        return self.light_radius

    def too_far_to_shade(self, altitude: np.ndarray) -> np.ndarray:
        return np.full_like(altitude, np.pi)  # on the other side of the light

    def outline(self, v: Points) -> Points:
        return v.with_axis()

    def shades(self, w: Points, p: Points) -> np.ndarray:
        """The ray from p through w, continued beyond w, meets the light.

        In the Klein model geodesics are straight, a point at distance rho lies at radius tanh(rho), and the
        light is the disc of radius tanh(R). With w at angle 0 the ray is w + t (w - p), t >= 0.
        """
        w_x = np.tanh(w.altitude)
        turn = p.position - w.position
        step_x = w_x - np.tanh(p.altitude) * np.cos(turn)
        step_y = -np.tanh(p.altitude) * np.sin(turn)
        step = np.hypot(step_x, step_y)
        same_point = step == 0
        approaching = w_x * step_x <= 0
        closest = np.abs(w_x * step_y) / np.where(same_point, 1.0, step)
        outside = w.altitude >= self.light_radius
        meets = approaching & (closest <= np.tanh(self.light_radius) * (1 + ROUNDING))
        return outside & (meets | same_point)


@dataclass(frozen=True)
class UmbralFinite:
    """Light: one point, the origin; every point is a ball of hyperbolic `radius` that does not hold it."""

    radius: float
    farthest_leaf: float = 12.0

    @property
    def nearest_root(self) -> float:
        return self.radius * (1 + 1e-9)  # a ball that touches the light would shade every direction at once

    def too_far_to_shade(self, altitude: np.ndarray) -> np.ndarray:
        return np.full_like(altitude, np.pi)  # on the other side of the light

    def outline(self, v: Points) -> Points:
        """8 points of the circle of radius r about v, the two seen farthest to the side among them.

        The circle about the origin is carried to v by an isometry (a Lorentz boost), and the widest angle
        under which a point of it is seen from the light is found by search.
        """
        v = v.with_axis()

        def seen_at(turn):
            return self._circle(v, turn).position - v.position

        widest = golden_section_maximum(seen_at, np.zeros_like(v.position), np.full_like(v.position, np.pi))
        turns = np.arange(1, 4) * (np.pi / 4)
        ends = np.broadcast_to(np.array([0.0, np.pi]), (*v.position.shape[:-1], 2))
        sides = np.broadcast_to(turns, (*v.position.shape[:-1], 3))
        return self._circle(v, np.concatenate([widest, -widest, ends, sides, -sides], -1))

    def _circle(self, v: Points, turn: np.ndarray) -> Points:
        along, across = np.sinh(self.radius) * np.cos(turn), np.sinh(self.radius) * np.sin(turn)
        time = np.cosh(self.radius)
        boosted = along * np.cosh(v.altitude) + time * np.sinh(v.altitude)
        return Points(v.position + np.arctan2(across, boosted), np.arcsinh(np.hypot(boosted, across)))

    def shades(self, w: Points, p: Points) -> np.ndarray:
        """The straight path of light from the origin to p comes within r of w.

        The point at distance s along the path is at distance d from w with
        `cosh d = cosh s cosh rho_w - sinh s sinh rho_w cos(angle)`; this is least where its derivative in s
        vanishes, `tanh s = tanh rho_w cos(angle)`, or at the end of the path.
        """
        cosine = np.cos(p.position - w.position)
        s = np.clip(np.arctanh(np.tanh(w.altitude) * cosine), 0, p.altitude)
        cosh_distance = np.cosh(s) * np.cosh(w.altitude) - np.sinh(s) * np.sinh(w.altitude) * cosine
        rounding = ROUNDING * np.cosh(s) * np.cosh(w.altitude)
        return (cosh_distance <= np.cosh(self.radius) + rounding) & (w.altitude > self.radius)
