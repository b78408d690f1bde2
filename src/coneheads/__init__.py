"""Hierarchy-aware attention for PyTorch: a drop-in for ``scaled_dot_product_attention``."""

from coneheads._version import __version__
from coneheads.functional import attention, attention_scores, attention_weights, available_backends
from coneheads.scores import (
    DotProduct,
    FinitePenumbral,
    FiniteUmbral,
    HalfSpaceDistance,
    HyperboloidDistance,
    Laplacian,
    Penumbral,
    Umbral,
)

__all__ = [
    "DotProduct",
    "FinitePenumbral",
    "FiniteUmbral",
    "HalfSpaceDistance",
    "HyperboloidDistance",
    "Laplacian",
    "Penumbral",
    "Umbral",
    "__version__",
    "attention",
    "attention_scores",
    "attention_weights",
    "available_backends",
]
