"""Aggregation in hyperbolic space: a weighted mean of points that moves with the isometries of the space."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.geometry.primitives import ball_gap


def einstein_midpoint(points: Tensor, weights: Tensor) -> Tensor:
    """Einstein midpoint in the Klein model, `m = sum_i (w_i g_i / sum_j w_j g_j) v_i`.

    `g_i = 1/sqrt(1 - |v_i|^2)` is the time coordinate of point i on the hyperboloid.
    Works with any non-negative weights, for instance attention weights; they need not sum to 1. A row of zero
    weights gives the centre of the ball.

    Args:
        points: v [..., S, d] in the Klein ball.
        weights: w [..., L, S].

    Returns:
        midpoints [..., L, d].

    Example:
        >>> points = torch.tensor([[0.5, 0.0], [-0.5, 0.0]])
        >>> einstein_midpoint(points, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        tensor([[0.0000, 0.0000],
                [0.5000, 0.0000]])
    """
    g = ball_gap(points).rsqrt().unsqueeze(-1)  # [..., S, 1]
    total = weights @ g  # [..., L, 1]
    return weights @ (g * points) / torch.where(total > 0, total, 1)
