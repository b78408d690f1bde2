"""Hyperbolic geometry in plain differentiable PyTorch: four models, lifts, and shadow cones."""

from coneheads.geometry import (
    aggregation,
    half_space,
    hyperboloid,
    klein,
    lifts,
    poincare_ball,
    primitives,
    shadow_cones,
)

__all__ = [
    "aggregation",
    "half_space",
    "hyperboloid",
    "klein",
    "lifts",
    "poincare_ball",
    "primitives",
    "shadow_cones",
]
