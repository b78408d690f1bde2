"""Layers: ``ConeAttention``, the operator with learned parameters, and ``ConeMultiheadAttention`` round it."""

from coneheads.nn.cone_attention import ConeAttention

__all__ = ["ConeAttention"]
