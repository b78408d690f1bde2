"""Poincare ball model: points [..., d] of the open unit ball, angles true; with Ganea's entailment cones."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry import hyperboloid
from coneheads.geometry.primitives import (
    Scalar,
    angle_from_chord_sq,
    ball_gap,
    safe_asinh,
    safe_norm,
    safe_sqrt,
    unit,
)


def distance(u: Tensor, v: Tensor) -> Tensor:
    """Hyperbolic distance, `2 asinh( |u - v| / sqrt((1 - |u|^2)(1 - |v|^2)) )`.

    Args:
        u, v: [..., d], broadcasting.

    Example:
        >>> distance(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.5]))
        tensor(1.0986)
    """
    return 2 * safe_asinh(safe_norm(u - v) / (ball_gap(u).sqrt() * ball_gap(v).sqrt()))


def aperture(x: Tensor, K: Scalar) -> Tensor:
    """Half-aperture of Ganea's entailment cone with apex x, `arcsin(K (1 - |x|^2) / |x|)`.

    Near the centre, where the argument would exceed 1 and no cone is defined, it is pi/2.

    Args:
        x: [..., d].
        K: > 0, number or tensor that broadcasts against [...].

    Example:
        >>> aperture(torch.tensor([0.0, 0.5]), K=0.1)
        tensor(0.1506)
    """
    norm, opposite = safe_norm(x), K * ball_gap(x)
    return torch.atan2(opposite, safe_sqrt((norm - opposite) * (norm + opposite)))


def in_cone(x: Tensor, y: Tensor, K: Scalar) -> Tensor:
    """Whether y lies in Ganea's entailment cone with apex x, that is, x precedes y.

    The angle at x between the ray from the centre through x and the geodesic from x to y is at most
    `aperture(x, K)`. With e = y - x that geodesic starts along `(1 - |x|^2) e - |e|^2 x`. The apex lies in
    its own cone.

    Args:
        x, y: [..., d], broadcasting.
        K: > 0, number or tensor that broadcasts against [...].

    Returns:
        bool [...].

    Example:
        >>> in_cone(torch.tensor([0.0, 0.5]), torch.tensor([[0.0, 0.9], [0.5, 0.0]]), K=0.1)
        tensor([ True, False])
    """
    e = y - x
    e_sq = e.square().sum(-1)
    start = ball_gap(x).unsqueeze(-1) * e - e_sq.unsqueeze(-1) * x
    angle = angle_from_chord_sq((unit(start) - unit(x)).square().sum(-1))
    return (angle <= aperture(x, K)) | (e == 0).all(-1)


def to_hyperboloid(p: Tensor) -> Tensor:
    """Isometry to the hyperboloid, `(2x, 1 + |x|^2) / (1 - |x|^2)`.

    Args:
        p: [..., d].

    Returns:
        points [..., d+1], time last.

    Example:
        >>> to_hyperboloid(torch.tensor([0.0, 0.5]))
        tensor([0.0000, 1.3333, 1.6667])
    """
    gap = ball_gap(p).unsqueeze(-1)
    return torch.cat([2 * p, 2 - gap], dim=-1) / gap


def to_klein(p: Tensor) -> Tensor:
    """Isometry to the Klein ball, `2x / (1 + |x|^2)`.

    Args:
        p: [..., d].

    Example:
        >>> to_klein(torch.tensor([0.0, 0.5]))
        tensor([0.0000, 0.8000])
    """
    return 2 * p / (1 + p.square().sum(-1, keepdim=True))


def to_half_space(p: Tensor) -> Tensor:
    """Isometry to the half-space, through the hyperboloid; the centre goes to O = (0, ..., 0, 1).

    Args:
        p: [..., d].

    Example:
        >>> to_half_space(torch.tensor([0.0, 0.5])).round(decimals=4)
        tensor([0., 3.])
    """
    return hyperboloid.to_half_space(to_hyperboloid(p))
