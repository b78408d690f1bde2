"""Klein model: points [..., d] of the open unit ball, where geodesics are straight segments."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry import hyperboloid
from coneheads.geometry.primitives import ball_gap, safe_asinh, safe_sqrt


def distance(u: Tensor, v: Tensor) -> Tensor:
    """Hyperbolic distance, `arcosh( (1 - u.v) / sqrt((1 - |u|^2)(1 - |v|^2)) )`.

    Computed, with e = v - u, as `asinh sqrt( (|e|^2 (1 - |u|^2) + (u.e)^2) / ((1 - |u|^2)(1 - |v|^2)) )`, a
    sum of positive terms that keeps its digits for near points.

    Args:
        u, v: [..., d], broadcasting.

    Example:
        >>> distance(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.6]))
        tensor(0.6931)
    """
    e = v - u
    gap_u, gap_v = ball_gap(u), ball_gap(v)
    sinh_sq = (e.square().sum(-1) * gap_u + (u * e).sum(-1).square()) / gap_u / gap_v
    return safe_asinh(safe_sqrt(sinh_sq))


def to_hyperboloid(p: Tensor) -> Tensor:
    """Isometry to the hyperboloid, `(x, 1) / sqrt(1 - |x|^2)`.

    Args:
        p: [..., d].

    Returns:
        points [..., d+1], time last.

    Example:
        >>> to_hyperboloid(torch.tensor([0.0, 0.6]))
        tensor([0.0000, 0.7500, 1.2500])
    """
    return torch.cat([p, torch.ones_like(p[..., :1])], dim=-1) / ball_gap(p).sqrt().unsqueeze(-1)


def to_poincare_ball(p: Tensor) -> Tensor:
    """Isometry to the Poincare ball, `x / (1 + sqrt(1 - |x|^2))`.

    Args:
        p: [..., d].

    Example:
        >>> to_poincare_ball(torch.tensor([0.0, 0.6]))
        tensor([0.0000, 0.3333])
    """
    return p / (1 + ball_gap(p).sqrt().unsqueeze(-1))


def to_half_space(p: Tensor) -> Tensor:
    """Isometry to the half-space, through the hyperboloid; the centre goes to O = (0, ..., 0, 1).

    Args:
        p: [..., d].

    Example:
        >>> to_half_space(torch.tensor([0.0, 0.6])).round(decimals=4)
        tensor([0., 2.])
    """
    return hyperboloid.to_half_space(to_hyperboloid(p))
