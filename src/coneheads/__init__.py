"""Hierarchy-aware attention for PyTorch: a drop-in for ``scaled_dot_product_attention``."""

import importlib
from typing import TYPE_CHECKING, Any

from coneheads._version import __version__

if TYPE_CHECKING:
    from coneheads.functional import (
        SortedEdges,
        attention,
        attention_scores,
        attention_weights,
        available_backends,
        edge_attention,
    )
    from coneheads.integrations.conversion import Conversion, convert, revert
    from coneheads.nn import ConeMultiheadAttention
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
    "ConeMultiheadAttention",
    "Conversion",
    "DotProduct",
    "FinitePenumbral",
    "FiniteUmbral",
    "HalfSpaceDistance",
    "HyperboloidDistance",
    "Laplacian",
    "Penumbral",
    "SortedEdges",
    "Umbral",
    "__version__",
    "attention",
    "attention_scores",
    "attention_weights",
    "available_backends",
    "convert",
    "edge_attention",
    "revert",
]
_HOMES = ("functional", "scores", "nn", "integrations.conversion")
_SUBMODULES = ("backends", "functional", "geometry", "integrations", "nn", "scores")


def __getattr__(name: str) -> Any:
    """Public names come with their first use: torch takes seconds to import, and ``coneheads --help`` needs none."""
    if name in _SUBMODULES:
        return importlib.import_module(f"coneheads.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'coneheads' has no attribute {name!r}")
    for module in _HOMES:
        home = importlib.import_module(f"coneheads.{module}")
        globals().update({public: getattr(home, public) for public in __all__ if hasattr(home, public)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
