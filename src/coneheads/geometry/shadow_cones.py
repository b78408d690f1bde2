"""Shadow cones: the partial orders by whose lowest common ancestor cone attention scores a pair.

The four classes apply the levels of `cone_levels` to points; those functions can be imported from here as
well. In all of them u precedes v when u lies in the shadow that contains v: u is the ancestor, nearer to the
light source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from coneheads.geometry.cone_levels import (
    finite_penumbral_level,
    finite_umbral_level,
    lca_level,
    lowest_light_height_sq,
    penumbral_height_sq,
    penumbral_level,
    penumbral_level_xi,
    precedes_by_level,
    umbral_height,
    umbral_level,
)
from coneheads.geometry.primitives import (
    Scalar,
    angle_from_chord_sq,
    safe_asinh,
    safe_norm,
    safe_sqrt,
    sinh,
    unit,
)

__all__ = [
    "FinitePenumbralCone",
    "FiniteUmbralCone",
    "PenumbralCone",
    "ShadowCone",
    "UmbralCone",
    "finite_penumbral_level",
    "finite_umbral_level",
    "lca_level",
    "lowest_light_height_sq",
    "penumbral_height_sq",
    "penumbral_level",
    "penumbral_level_xi",
    "precedes_by_level",
    "umbral_height",
    "umbral_level",
]


class ShadowCone(ABC):
    """What the four cones share; u and v are points [..., n] and broadcast against each other."""

    @abstractmethod
    def level(self, u: Tensor) -> Tensor:
        """Level [...] of the points u, growing toward the light source."""

    @abstractmethod
    def separation(self, u: Tensor, v: Tensor) -> Tensor:
        """Distance D [...] of the positions of u and v, which the levels are compared with."""

    @abstractmethod
    def height_from_level(self, level: Tensor) -> Tensor:
        """Inverse of `level` in the coordinate that it depends on; NaN for a level that no point has."""

    @abstractmethod
    def _point_between(self, u: Tensor, v: Tensor, shift: Tensor, distance: Tensor, height: Tensor) -> Tensor:
        """Point of this height whose position is that of u moved toward v by `shift` <= `distance`."""

    def precedes(self, u: Tensor, v: Tensor) -> Tensor:
        """Whether u is an ancestor of v or v itself: `D(u, v) <= level(u) - level(v)`, bool [...]."""
        return precedes_by_level(self.level(u), self.level(v), self.separation(u, v))

    def lca_level(self, u: Tensor, v: Tensor) -> Tensor:
        """Level [...] of the lowest common ancestor, by the law of `cone_levels.lca_level`."""
        return lca_level(self.level(u), self.level(v), self.separation(u, v))

    def lca(self, u: Tensor, v: Tensor) -> Tensor:
        """Lowest common ancestor [..., n]; NaN coordinates where the pair has none.

        Its position is that of u moved toward v by `lca_level - level(u)`; an ancestor of the other point is
        returned as it is, to the last bit.
        """
        level_u, level_v, distance = self.level(u), self.level(v), self.separation(u, v)
        level = lca_level(level_u, level_v, distance)
        shift = torch.minimum((level - level_u).clamp_min(0), distance)
        point = self._point_between(u, v, shift, distance, self.height_from_level(level))
        point = torch.where(precedes_by_level(level_v, level_u, distance).unsqueeze(-1), v, point)
        return torch.where(precedes_by_level(level_u, level_v, distance).unsqueeze(-1), u, point)


class _HalfSpaceCone(ShadowCone):
    """Light source at infinity: a position is horizontal, and the distance of two positions is Euclidean."""

    def separation(self, u: Tensor, v: Tensor) -> Tensor:
        """Euclidean distance [...] of the horizontal positions."""
        return safe_norm(u[..., :-1] - v[..., :-1])

    def _point_between(self, u: Tensor, v: Tensor, shift: Tensor, distance: Tensor, height: Tensor) -> Tensor:
        fraction = (shift / torch.where(distance > 0, distance, 1)).unsqueeze(-1)
        x = u[..., :-1] + fraction * (v[..., :-1] - u[..., :-1])
        return _where_height_exists(torch.cat([x, height.unsqueeze(-1)], dim=-1), height)


class _HyperboloidCone(ShadowCone):
    """Light source round the origin: a position is a direction, the distance of two positions an angle."""

    def separation(self, u: Tensor, v: Tensor) -> Tensor:
        """Angle [...] between the directions from the origin, in [0, pi]."""
        return angle_from_chord_sq((unit(u[..., :-1]) - unit(v[..., :-1])).square().sum(-1))

    def _point_between(self, u: Tensor, v: Tensor, shift: Tensor, distance: Tensor, height: Tensor) -> Tensor:
        # Along the great circle. Equal directions never get here (one point precedes the other), and opposite
        # ones have no common ancestor, so a sine of 0 only has to stay finite.
        sine = torch.sin(distance)
        sine = torch.where(sine > 0, sine, 1)
        weight_u, weight_v = torch.sin(distance - shift) / sine, torch.sin(shift) / sine
        direction = unit(weight_u.unsqueeze(-1) * unit(u[..., :-1]) + weight_v.unsqueeze(-1) * unit(v[..., :-1]))
        rho = torch.where(height.isnan(), 0, height).unsqueeze(-1)
        return _where_height_exists(torch.cat([direction * torch.sinh(rho), torch.cosh(rho)], dim=-1), height)


@dataclass(frozen=True)
class PenumbralCone(_HalfSpaceCone):
    """Penumbral cones of a light source that is the horosphere at height h, on half-space points [..., d].

    Points above the light count as lying at height h.

    Example:
        >>> cone = PenumbralCone(light_height=5.0)
        >>> u, v = torch.tensor([0.0, 3.0]), torch.tensor([2.0, 3.0])
        >>> cone.lca_level(u, v), cone.lca(u, v)
        (tensor(2.), tensor([1., 4.]))
    """

    light_height: Scalar = 1.0

    def level(self, u: Tensor) -> Tensor:
        """`h - sqrt(h^2 - y^2)`, in [0, h]."""
        return penumbral_level(u[..., -1], self.light_height)

    def height_from_level(self, level: Tensor) -> Tensor:
        """Euclidean height `sqrt(L (2h - L))`; NaN outside 0 <= L <= h."""
        exists = (level >= 0) & (level <= self.light_height)
        height_sq = penumbral_height_sq(torch.where(exists, level, 0), self.light_height)
        return torch.where(exists, safe_sqrt(height_sq), math.nan)


@dataclass(frozen=True)
class UmbralCone(_HalfSpaceCone):
    """Umbral cones of a light at infinity, each point a ball of radius r, on half-space points [..., d].

    Every pair has a common ancestor.

    Example:
        >>> cone = UmbralCone(radius=math.asinh(1.0))
        >>> cone.lca(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0]))
        tensor([1., 2.])
    """

    radius: Scalar = 0.1

    def level(self, u: Tensor) -> Tensor:
        """`y sinh r`, >= 0."""
        return umbral_level(u[..., -1], self.radius)

    def height_from_level(self, level: Tensor) -> Tensor:
        """Euclidean height `L / sinh r`."""
        return umbral_height(level, self.radius)


@dataclass(frozen=True)
class FinitePenumbralCone(_HyperboloidCone):
    """Penumbral cones of a light that is a ball round the origin, on hyperboloid points [..., d+1].

    The same order as Ganea's entailment cones with K = sinh(R)/2, R the radius. Points inside the light count
    as on its surface.

    Example:
        >>> cone = FinitePenumbralCone(light_radius=0.2)
        >>> near = torch.tensor([math.sinh(1.0), 0.0, math.cosh(1.0)])
        >>> far = torch.tensor([math.sinh(2.0), 0.0, math.cosh(2.0)])
        >>> cone.precedes(near, far), cone.precedes(far, near)
        (tensor(True), tensor(False))
    """

    light_radius: Scalar = 0.2

    def level(self, u: Tensor) -> Tensor:
        """`-arccos(tanh R / tanh rho)`, 0 on the light, negative elsewhere."""
        return finite_penumbral_level((_distance_from_origin(u) - self.light_radius).clamp_min(0), self.light_radius)

    def height_from_level(self, level: Tensor) -> Tensor:
        """Distance rho from the origin, `artanh(tanh R / cos L)`; NaN outside `-arccos(tanh R) < L <= 0`.

        Computed as `asinh(sinh R / sqrt((1 - c)(1 + c)))` with c = cosh R sin(-L), which does not cancel near
        R.
        """
        sinh_radius = sinh(self.light_radius)
        c = (1 + sinh_radius**2) ** 0.5 * torch.sin(-level)
        exists = (level <= 0) & (c < 1)
        c = torch.where(exists, c, 0)
        return torch.where(exists, safe_asinh(sinh_radius / ((1 - c) * (1 + c)).sqrt()), math.nan)


@dataclass(frozen=True)
class FiniteUmbralCone(_HyperboloidCone):
    """Umbral cones of a point light at the origin, each point a ball, on hyperboloid points [..., d+1].

    Points nearer to the light than the radius r of their ball count as at distance r.

    Example:
        >>> cone = FiniteUmbralCone(radius=0.1)
        >>> near = torch.tensor([math.sinh(1.5), 0.0, math.cosh(1.5)])
        >>> cone.height_from_level(cone.level(near)).round(decimals=3)
        tensor(1.5000)
    """

    radius: Scalar = 0.1

    def level(self, u: Tensor) -> Tensor:
        """`arcsin(sinh r / sinh rho)`, in (0, pi/2]."""
        return finite_umbral_level((_distance_from_origin(u) - self.radius).clamp_min(0), self.radius)

    def height_from_level(self, level: Tensor) -> Tensor:
        """Distance rho from the origin, `asinh(sinh r / sin L)`; NaN outside 0 < L <= pi/2."""
        exists = (level > 0) & (level <= math.pi / 2)
        sine = torch.where(exists, torch.sin(level), 1)
        return torch.where(exists, safe_asinh(sinh(self.radius) / sine), math.nan)


def _distance_from_origin(u: Tensor) -> Tensor:
    # From the spatial part: arcosh of the time coordinate loses half the digits near the origin.
    return safe_asinh(safe_norm(u[..., :-1]))


def _where_height_exists(point: Tensor, height: Tensor) -> Tensor:
    return torch.where(height.isnan().unsqueeze(-1), math.nan, point)
