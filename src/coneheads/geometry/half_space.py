"""Upper half-space model: points [..., d], the height y > 0 last; metric (dx^2 + dy^2) / y^2."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry import hyperboloid, lifts
from coneheads.geometry.primitives import Scalar, asinhc, safe_asinh, safe_norm

HEIGHT_FLOOR = 1e-18
"""Distances take a point as at least this high, to stay finite in float32; every lift but `xi` is above."""

_SHIFT_FLOOR = 1e-30


def distance(u: Tensor, v: Tensor) -> Tensor:
    """Hyperbolic distance, `2 asinh( |u - v| / (2 sqrt(y_u y_v)) )`, with the Euclidean |u - v|.

    Args:
        u, v: [..., d], broadcasting.

    Example:
        >>> distance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]))
        tensor(0.6931)
    """
    return 2 * safe_asinh(_sinh_half_distance(u, v))


def exp(p: Tensor, v: Tensor) -> Tensor:
    """Exponential map at p: the point reached by following the tangent vector v for the distance |v|.

    v is given in the orthonormal frame at p, whose axes are the coordinate axes, so that distance(p, exp(p,
    v)) = |v|. It is the map at O = (0, ..., 0, 1), dilated by y_p and translated, and saturates where
    `lifts.exp` does.

    Args:
        p: points [..., d].
        v: tangent vectors [..., d].

    Example:
        >>> exp(torch.tensor([3.0, 2.0]), torch.tensor([0.0, 0.0]))
        tensor([3., 2.])
    """
    x, y = lifts.exp(v)
    y_p = p[..., -1]
    return torch.cat([p[..., :-1] + y_p.unsqueeze(-1) * x, (y_p * y).unsqueeze(-1)], dim=-1)


def log(p: Tensor, q: Tensor) -> Tensor:
    """Inverse of `exp`: the tangent vector at p, in the orthonormal frame there, that leads to q.

    With n = distance(p, q) and k = n / sinh n: `v_x = k (x_q - x_p) / y_q`,
    `v_d = k (|x_q - x_p|^2 + y_q^2 - y_p^2) / (2 y_p y_q)`.

    Args:
        p, q: points [..., d], broadcasting.

    Example:
        >>> log(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]))
        tensor([0.0000, 0.6931])
    """
    mean_height = _mean_height(p, q)
    a = _sinh_half_distance(p, q)
    # k = asinhc(a) / sqrt(1 + a^2): each of these goes to one factor of a product that would overflow.
    k_1, k_2 = asinhc(a), 1 / torch.hypot(a, torch.ones_like(a))
    y_p, y_q = p[..., -1] / mean_height, q[..., -1] / mean_height
    shift = (q[..., :-1] - p[..., :-1]) / mean_height.unsqueeze(-1)
    v_x = shift * (k_1 * k_2 * y_p).unsqueeze(-1)
    rise = (q[..., -1] - p[..., -1]) / mean_height
    shift_sq = (shift * k_1.unsqueeze(-1) * shift * k_2.unsqueeze(-1)).sum(-1)
    v_d = (shift_sq + rise * k_1 * (y_p + y_q) * k_2) / 2
    return torch.cat([v_x, v_d.unsqueeze(-1)], dim=-1)


def geodesic(u: Tensor, v: Tensor, t: Scalar) -> Tensor:
    """Point at fraction t of the way from u to v along their geodesic; t outside [0, 1] extends it.

    `exp(u, t log(u, v))`.

    Args:
        u, v: points [..., d], broadcasting.
        t: number or tensor that broadcasts against [...].

    Example:
        >>> geodesic(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 1.0]), 0.5).abs().round(decimals=4)
        tensor([0.0000, 1.4142])
    """
    t = t.unsqueeze(-1) if isinstance(t, Tensor) else t
    return exp(u, t * log(u, v))


def to_hyperboloid(p: Tensor) -> Tensor:
    """Isometry to the hyperboloid, `(2x, |x|^2 + y^2 - 1, |x|^2 + y^2 + 1) / (2y)`; O goes to the origin.

    Args:
        p: [..., d].

    Returns:
        points [..., d+1], time last.

    Example:
        >>> to_hyperboloid(torch.tensor([0.0, 1.0]))
        tensor([0., 0., 1.])
    """
    x, y = p[..., :-1], p[..., -1:]
    x_sq = x.square().sum(-1, keepdim=True)
    return torch.cat([x / y, (x_sq + (y - 1) * (y + 1)) / (2 * y), (x_sq + y * y + 1) / (2 * y)], dim=-1)


def to_klein(p: Tensor) -> Tensor:
    """Isometry to the Klein ball, through the hyperboloid.

    Args:
        p: [..., d].

    Example:
        >>> to_klein(torch.tensor([1.0, 1.0]))
        tensor([0.6667, 0.3333])
    """
    return hyperboloid.to_klein(to_hyperboloid(p))


def to_poincare_ball(p: Tensor) -> Tensor:
    """Isometry to the Poincare ball, `(2x, |x|^2 + y^2 - 1) / (|x|^2 + (y + 1)^2)`; O goes to the origin.

    Args:
        p: [..., d].

    Example:
        >>> to_poincare_ball(torch.tensor([1.0, 1.0]))
        tensor([0.4000, 0.2000])
    """
    x, y = p[..., :-1], p[..., -1:]
    x_sq = x.square().sum(-1, keepdim=True)
    return torch.cat([2 * x, x_sq + (y - 1) * (y + 1)], dim=-1) / (x_sq + (y + 1).square())


def _sinh_half_distance(u: Tensor, v: Tensor) -> Tensor:
    shift = u - v
    # A constant that brings the norm near 1: else the squares of the lowest leaves' coordinates underflow,
    # and the backward pass overflows. It cancels, so the derivatives do not depend on it.
    scale = shift.detach().abs().amax(-1).clamp_min(_SHIFT_FLOOR)
    return safe_norm(shift / scale.unsqueeze(-1)) * (scale / (2 * _mean_height(u, v)))


def _mean_height(u: Tensor, v: Tensor) -> Tensor:
    # The product of roots, not the root of the product, which underflows for two low points.
    return u[..., -1].clamp_min(HEIGHT_FLOOR).sqrt() * v[..., -1].clamp_min(HEIGHT_FLOOR).sqrt()
