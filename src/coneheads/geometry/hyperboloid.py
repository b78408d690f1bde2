"""Hyperboloid model: points [..., d+1], time last, |x|^2 - t^2 = -1, t > 0; the origin is (0, ..., 0, 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry.primitives import safe_asinh, safe_norm, safe_sqrt, unit

# Up to this |x| the distance uses a form that is smooth through the origin, beyond it one made for large
# radii.
_NEAR_ORIGIN = 0.5


def minkowski_dot(u: Tensor, v: Tensor) -> Tensor:
    """Minkowski product, `x_u . x_v - t_u t_v`; equals -cosh(distance) on the hyperboloid.

    Args:
        u, v: [..., d+1], broadcasting.

    Example:
        >>> minkowski_dot(torch.tensor([0.0, 1.0]), torch.tensor([0.75, 1.25]))
        tensor(-1.2500)
    """
    return (u[..., :-1] * v[..., :-1]).sum(-1) - u[..., -1] * v[..., -1]


def distance(u: Tensor, v: Tensor) -> Tensor:
    """Hyperbolic distance, `2 asinh( sqrt(|x_u - x_v|^2 - (t_u - t_v)^2) / 2 )`.

    Not arcosh(-minkowski_dot), which sees no difference between near points. The difference under the root is
    expanded so that it does not cancel either. Only the spatial part is read: t = sqrt(1 + |x|^2) gives the
    time.

    Args:
        u, v: [..., d+1], broadcasting.

    Example:
        >>> distance(torch.tensor([0.0, 1.0]), torch.tensor([0.75, 1.25]))
        tensor(0.6931)
    """
    x_u, x_v = u[..., :-1], v[..., :-1]
    r_u, r_v = safe_norm(x_u), safe_norm(x_v)
    near = torch.minimum(r_u, r_v) < _NEAR_ORIGIN
    # Points of the other branch are replaced by harmless ones, so that no slope of an unused form overflows.
    keep, zero, one = near.unsqueeze(-1), torch.zeros_like(x_u), torch.ones_like(x_u)
    near_sq = _chord_sq_near(torch.where(keep, x_u, zero), torch.where(keep, x_v, zero))
    far_sq = _chord_sq_far(torch.where(keep, one, x_u), torch.where(keep, one, x_v))
    return 2 * safe_asinh(safe_sqrt(torch.where(near, near_sq, far_sq)) / 2)


def _chord_sq_near(x_u: Tensor, x_v: Tensor) -> Tensor:
    """4 sinh^2(distance / 2) as (1 + t_u)(1 + t_v) |p_u - p_v|^2, p = x/(1 + t) as in the Poincare ball."""
    t_u, t_v = _time(x_u), _time(x_v)
    shift = x_u - x_v
    t_shift = (shift * (x_u + x_v)).sum(-1, keepdim=True) / (t_u + t_v)  # t_u - t_v
    p_shift = shift / (1 + t_u) - x_v / (1 + t_v) * t_shift / (1 + t_u)  # p_u - p_v
    return (p_shift.square().sum(-1, keepdim=True) * (1 + t_u) * (1 + t_v)).squeeze(-1)


def _chord_sq_far(x_u: Tensor, x_v: Tensor) -> Tensor:
    """4 sinh^2(distance / 2) as 4 sinh^2((a - b)/2) + r_u r_v |direction difference|^2.

    a and b are the radii, r = |x| = sinh(radius); the first term is (r_u - r_v)^2 - (t_u - t_v)^2, written
    with sums only.
    """
    t_u, t_v = _time(x_u), _time(x_v)
    r_u, r_v = safe_norm(x_u, keepdim=True), safe_norm(x_v, keepdim=True)
    r_shift = ((x_u - x_v) * (x_u + x_v)).sum(-1, keepdim=True) / (r_u + r_v)  # r_u - r_v
    e_u, e_v = t_u + r_u, t_v + r_v  # exp(radius)
    radial_sq = r_shift / (t_u + t_v) * r_shift * ((1 / e_u + 1 / e_v) * (e_u + e_v) / (t_u + t_v))
    angular_sq = r_u * r_v * (unit(x_u) - unit(x_v)).square().sum(-1, keepdim=True)
    return (radial_sq + angular_sq).squeeze(-1)


def _time(x: Tensor) -> Tensor:
    return (1 + x.square().sum(-1, keepdim=True)).sqrt()


def to_klein(p: Tensor) -> Tensor:
    """Isometry to the Klein ball, `x / t`.

    Args:
        p: [..., d+1].

    Returns:
        points [..., d].

    Example:
        >>> to_klein(torch.tensor([0.75, 1.25]))
        tensor([0.6000])
    """
    return p[..., :-1] / p[..., -1:]


def to_poincare_ball(p: Tensor) -> Tensor:
    """Isometry to the Poincare ball, `x / (1 + t)`.

    Args:
        p: [..., d+1].

    Returns:
        points [..., d].

    Example:
        >>> to_poincare_ball(torch.tensor([0.75, 1.25]))
        tensor([0.3333])
    """
    return p[..., :-1] / (1 + p[..., -1:])


def to_half_space(p: Tensor) -> Tensor:
    """Isometry to the half-space, `(x_1, ..., x_(d-1), 1) / (t - x_d)`; the origin goes to O.

    For x_d > 0 the denominator is `(1 + x_1^2 + ... + x_(d-1)^2) / (t + x_d)`, which does not cancel.

    Args:
        p: [..., d+1], d >= 1.

    Returns:
        points [..., d], height last.

    Example:
        >>> to_half_space(torch.tensor([0.0, 0.75, 1.25]))
        tensor([0., 2.])
    """
    x, x_d, t = p[..., :-2], p[..., -2:-1], p[..., -1:]
    up = x_d > 0
    gap = torch.where(up, (1 + x.square().sum(-1, keepdim=True)) / torch.where(up, t + x_d, 1), t - x_d)
    return torch.cat([x, torch.ones_like(x_d)], dim=-1) / gap
