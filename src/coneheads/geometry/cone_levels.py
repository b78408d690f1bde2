"""Levels of the four shadow cones: one scalar a point, from which order and lowest common ancestor follow.

With D the distance between two positions, in all four settings

    u precedes v  <=>  D(u, v) <= level(u) - level(v)
    level(lca(u, v)) = max( level(u), level(v), (level(u) + level(v) + D(u, v)) / 2 )

Every function is elementwise: its tensor arguments broadcast against one another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry.primitives import Scalar, safe_sqrt, sigmoid, sinh


def lca_level(level_u: Tensor, level_v: Tensor, distance: Tensor) -> Tensor:
    """Level of the lowest common ancestor, `max(level_u, level_v, (level_u + level_v + distance) / 2)`.

    Args:
        level_u, level_v: levels of the two points.
        distance: D(u, v) >= 0, between their positions.

    Example:
        >>> lca_level(torch.tensor(1.0), torch.tensor(2.0), torch.tensor([0.5, 3.0]))
        tensor([2., 3.])
    """
    return torch.maximum(torch.maximum(level_u, level_v), (level_u + level_v + distance) / 2)


def precedes_by_level(level_u: Tensor, level_v: Tensor, distance: Tensor) -> Tensor:
    """Whether u is an ancestor of v (or v itself), `distance <= level_u - level_v`.

    Args:
        level_u, level_v: levels of the two points.
        distance: D(u, v) >= 0, between their positions.

    Example:
        >>> precedes_by_level(torch.tensor(2.0), torch.tensor(1.0), torch.tensor([0.5, 3.0]))
        tensor([ True, False])
    """
    return distance <= level_u - level_v


def penumbral_level(y: Tensor, light_height: Scalar) -> Tensor:
    """Penumbral level of a height, `h - sqrt(h^2 - y^2)`, from 0 at the boundary to h at the light source.

    Computed as `y^2 / (h + sqrt((h - y)(h + y)))`, which does not cancel. Heights above h count as h.

    Args:
        y: heights.
        light_height: h > 0.

    Example:
        >>> penumbral_level(torch.tensor([0.0, 3.0, 5.0]), light_height=5.0)
        tensor([0., 1., 5.])
    """
    y = torch.clamp(y, max=light_height)
    return y * y / (light_height + safe_sqrt((light_height - y) * (light_height + y)))


def penumbral_level_xi(f_d: Tensor, light_height: Scalar) -> Tensor:
    """Penumbral level of the height `y = h * sigmoid(f_d)`, from the feature itself.

    With s = sigmoid(f_d): `y^2 / (h + tau)`, `tau = h sqrt(sigmoid(-f_d) (1 + s))`. Near the light source h -
    y cancels, and sigmoid(-f_d) = (h - y)/h does not.

    Args:
        f_d: last feature, already multiplied by the height scale.
        light_height: h > 0.

    Example:
        >>> penumbral_level_xi(torch.tensor([-1e4, 0.0, 1e4]), light_height=1.0)
        tensor([0.0000, 0.1340, 1.0000])
    """
    s = sigmoid(f_d)
    return light_height * (s * s / (1 + safe_sqrt(sigmoid(-f_d) * (1 + s))))


def penumbral_height_sq(level: Tensor, light_height: Scalar) -> Tensor:
    """Squared height of a penumbral level L, `L (2h - L)`, for 0 <= L <= h.

    Args:
        level: levels.
        light_height: h > 0.

    Example:
        >>> penumbral_height_sq(torch.tensor([0.0, 1.0, 5.0]), light_height=5.0)
        tensor([ 0.,  9., 25.])
    """
    return level * (2 * light_height - level)


def lowest_light_height_sq(d_sq: Tensor, y_u_sq: Tensor, y_v_sq: Tensor) -> Tensor:
    """Squared height of the lowest light source under which two points have a common penumbral ancestor.

    `d_sq/4 + (y_u_sq + y_v_sq)/2 + (y_u_sq - y_v_sq)^2 / (4 d_sq)`, the squared radius of the semicircle
    through both. A pair with `d_sq <= |y_u_sq - y_v_sq|` needs no more than its own upper point: there it is
    max(y_u_sq, y_v_sq), where the formula meets it, and this also keeps the value and gradient finite as d_sq
    goes to 0.

    Args:
        d_sq: squared distance of the horizontal positions.
        y_u_sq, y_v_sq: squared heights.

    Example:
        >>> lowest_light_height_sq(torch.tensor([0.0, 4.0]), torch.tensor(1.0), torch.tensor(1.0))
        tensor([1., 2.])
    """
    difference = y_u_sq - y_v_sq
    d_sq = torch.maximum(d_sq, difference.abs())
    ratio = difference / torch.where(d_sq > 0, d_sq, 1)  # in [-1, 1]
    return d_sq / 4 + (y_u_sq + y_v_sq) / 2 + difference * ratio / 4


def umbral_level(y: Tensor, radius: Scalar) -> Tensor:
    """Umbral level of a height, `y sinh(r)`.

    Args:
        y: heights.
        radius: hyperbolic radius r > 0 of the ball round each point.

    Example:
        >>> umbral_level(torch.tensor(2.0), radius=1.0)
        tensor(2.3504)
    """
    return y * sinh(radius)


def umbral_height(level: Tensor, radius: Scalar) -> Tensor:
    """Height of an umbral level L, `L / sinh(r)`.

    Args:
        level: levels.
        radius: hyperbolic radius r > 0 of the ball round each point.

    Example:
        >>> umbral_height(torch.tensor(2.3504), radius=1.0)
        tensor(2.0000)
    """
    return level / sinh(radius)


def finite_penumbral_level(excess: Tensor, light_radius: Scalar) -> Tensor:
    """Level under a light that is a ball of radius R round the origin, `-arccos(tanh R / tanh rho)`.

    0 on the surface of the light, falling to `-arccos(tanh R)` at the boundary of the space. Computed from
    `tan^2 = sinh(rho - R) sinh(rho + R) / (cosh rho sinh R)^2`, where nothing cancels or overflows.

    Args:
        excess: rho - R >= 0, distance from the surface of the light.
        light_radius: R > 0.

    Example:
        >>> finite_penumbral_level(torch.tensor([1.0, 100.0]), light_radius=0.2)
        tensor([-1.3318, -1.3721])
    """
    rho = light_radius + excess
    tangent = safe_sqrt(torch.expm1(-2 * excess) * torch.expm1(-2 * (rho + light_radius)))
    return -torch.atan(tangent / ((1 + torch.exp(-2 * rho)) * sinh(light_radius)))


def finite_umbral_level(excess: Tensor, radius: Scalar) -> Tensor:
    """Level of a ball of radius r under a point light at the origin, `arcsin(sinh r / sinh rho)`.

    The half-angle under which the ball is seen: pi/2 where it touches the light, falling to 0 at the
    boundary. Computed from `tan^2 = sinh(r)^2 / (sinh(rho - r) sinh(rho + r))`, where nothing cancels or
    overflows.

    Args:
        excess: rho - r >= 0, distance of the ball's surface from the light.
        radius: r > 0.

    Example:
        >>> finite_umbral_level(torch.tensor([0.0, 1.0]), radius=0.1)
        tensor([1.5708, 0.0751])
    """
    rho = radius + excess
    adjacent = safe_sqrt(torch.expm1(-2 * excess) * torch.expm1(-2 * (rho + radius)))
    opposite = torch.exp(-rho) * (2 * sinh(radius))
    # atan2(opposite, adjacent), which on a CPU rounds the last elements of a tensor otherwise: see `primitives.sigmoid`
    near = adjacent < opposite
    angle = torch.atan(torch.where(near, adjacent, opposite) / torch.where(near, opposite, adjacent))
    return torch.where(near, torch.pi / 2 - angle, angle)
