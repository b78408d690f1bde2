"""Lifts: from feature vectors to points of hyperbolic space.

A feature vector `f` [..., E] gives a horizontal position from its first E-1 entries and a height (or radius)
from its last, `f_d`. Finite features, however large, give finite points and gradients: the lifts saturate at
the limits below, which are the same in every dtype, so that a score does not change its meaning with the
precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry.primitives import Scalar, safe_norm, sigmoid, sinhc, unit

LOG_HEIGHT_LIMIT = 20.0
"""`psi` clamps the logarithm of the height to [-20, 20]; `exp` goes at most that far from O, in any direction."""

RADIUS_LIMIT = 40.0
"""`polar` and `pseudopolar` saturate the distance from the origin at 40: exp(2 * 40) fits float32."""

POSITION_LIMIT = 1e15
"""Coordinates of a position are clamped to [-1e15, 1e15]: squared distances fit float32, sums included."""

# Features beyond this are clamped where a height may be 0: their sum in the backward pass would overflow.
_FEATURE_LIMIT = 1e30

# Squared distance from O below which `exp` uses smooth functions of |f|^2, whose gradient at f = 0 is exact.
_NEAR_ORIGIN_SQ = 0.01


def psi(f: Tensor, height_scale: Scalar = 1.0) -> tuple[Tensor, Tensor]:
    """Lift to the half-space with unbounded height: `y = exp(f_d)`, `x = f[:-1] * y`.

    `f_d` saturates at +-LOG_HEIGHT_LIMIT and x at +-POSITION_LIMIT, so that every finite float32 input gives
    a finite score.

    Args:
        f: [..., E], E >= 2.
        height_scale: multiplies `f_d` before the lift.

    Returns:
        x [..., E-1] and y [...].

    Example:
        >>> psi(torch.tensor([1.0, 2.0, 0.0]))
        (tensor([1., 2.]), tensor(1.))
    """
    f_x, f_d = f[..., :-1], f[..., -1] * height_scale
    y = f_d.clamp(-LOG_HEIGHT_LIMIT, LOG_HEIGHT_LIMIT).exp()
    return _limit_position(f_x * y.unsqueeze(-1)), y


def xi(f: Tensor, light_height: Scalar = 1.0, height_scale: Scalar = 1.0) -> tuple[Tensor, Tensor]:
    """Lift to the half-space below the light source: `y = h * sigmoid(f_d)`, `x = f[:-1] * y`.

    x saturates at +-POSITION_LIMIT. y needs no limit above; far below 0 it underflows to 0, a leaf on the
    boundary.

    Args:
        f: [..., E], E >= 2.
        light_height: h > 0, number or tensor that broadcasts against y.
        height_scale: multiplies `f_d` before the lift.

    Returns:
        x [..., E-1] and y [...], 0 <= y <= h.

    Example:
        >>> xi(torch.tensor([1.0, 2.0, 0.0]), light_height=2.0)
        (tensor([1., 2.]), tensor(1.))
    """
    f_x, f_d = f[..., :-1].clamp(-_FEATURE_LIMIT, _FEATURE_LIMIT), f[..., -1] * height_scale
    y = light_height * sigmoid(f_d)
    return _limit_position(f_x * y.unsqueeze(-1)), y


def exp(f: Tensor, height_scale: Scalar = 1.0) -> tuple[Tensor, Tensor]:
    """Exponential map of the half-space at O = (0, ..., 0, 1); f is in the orthonormal frame at O.

    With n = |f|: `y = 1 / (cosh n - f_d sinh(n)/n)`, `x = f[:-1] sinh(n)/n * y`, so that distance(O, (x, y))
    = n. The norm n saturates (along the ray of f) at LOG_HEIGHT_LIMIT, x at +-POSITION_LIMIT.

    Args:
        f: [..., E], E >= 2.
        height_scale: multiplies `f_d` before the lift.

    Returns:
        x [..., E-1] and y [...].

    Example:
        >>> x, y = exp(torch.tensor([0.0, 2.0]))
        >>> x, y.log()
        (tensor([0.]), tensor(2.))
    """
    f = torch.cat([f[..., :-1], (f[..., -1] * height_scale).unsqueeze(-1)], dim=-1)
    f = _limit_position(f)
    n = safe_norm(f)
    f = f * (LOG_HEIGHT_LIMIT / n.clamp_min(LOG_HEIGHT_LIMIT)).unsqueeze(-1)
    n = n.clamp_max(LOG_HEIGHT_LIMIT)
    f_x, f_d = f[..., :-1], f[..., -1]

    n_sq = f.square().sum(-1)
    sinh_ratio = sinhc(n_sq)
    near = n_sq < _NEAR_ORIGIN_SQ
    # cosh n = 1 + 2 sinh(n/2)^2 is a function of n^2 alone: no root, hence no kink at f = 0.
    near_sq = torch.where(near, n_sq, 0)
    inverse_y_near = 1 + near_sq / 2 * sinhc(near_sq / 4).square() - torch.where(near, f_d, 0) * sinh_ratio

    # cosh n - f_d sinh(n)/n = exp(-n) + (n - f_d) sinh(n)/n. Going up n - f_d cancels, |f_x|^2 / (n + f_d)
    # does not; the root of sinh(n)/n goes inside that square because sinh(n)/n times the slope of 1/y
    # overflows.
    up = (f_d > 0) & ~near
    rise = torch.where(up, n + f_d, 1)
    half_ratio = sinh_ratio.sqrt().unsqueeze(-1)
    sideways_sq = (half_ratio * f_x).square().sum(-1)
    gap = torch.where(up, sideways_sq / rise, sinh_ratio * (n - f_d))
    y = 1 / torch.where(near, inverse_y_near, torch.exp(-n) + gap)
    return _limit_position(f_x * sinh_ratio.unsqueeze(-1) * y.unsqueeze(-1)), y


def polar(f: Tensor) -> tuple[Tensor, Tensor]:
    """Direction and distance from the origin: `direction = f[:-1]/|f[:-1]|`, `radius = f_d`, made >= 0.

    A negative radius is the same point as the positive one in the opposite direction, so for f_d < 0 both
    change sign. The radius saturates at RADIUS_LIMIT.

    Args:
        f: [..., E], E >= 2. f[:-1] = 0 has no direction and gives the zero vector.

    Returns:
        direction [..., E-1] of norm 1 and radius [...] >= 0.

    Example:
        >>> polar(torch.tensor([3.0, 4.0, -2.0]))
        (tensor([-0.6000, -0.8000]), tensor(2.))
    """
    f_x, f_d = f[..., :-1], f[..., -1]
    # Not sign() or abs(): both have gradient 0 at f_d = 0, where the point still moves with f_d.
    sign = torch.where(f_d < 0, -1, 1).to(f.dtype)
    radius = (f_d * sign).clamp_max(RADIUS_LIMIT)
    return unit(_limit_position(f_x)) * sign.unsqueeze(-1), radius


def pseudopolar(f: Tensor) -> Tensor:
    """Lift to the hyperboloid: `(direction * sinh(radius), cosh(radius))`, time last; see `polar`.

    Args:
        f: [..., E], E >= 2.

    Returns:
        point [..., E].

    Example:
        >>> pseudopolar(torch.tensor([5.0, 1.0]))
        tensor([1.1752, 1.5431])
    """
    direction, radius = polar(f)
    radius = radius.unsqueeze(-1)
    return torch.cat([direction * torch.sinh(radius), torch.cosh(radius)], dim=-1)


def _limit_position(x: Tensor) -> Tensor:
    return x.clamp(-POSITION_LIMIT, POSITION_LIMIT)
