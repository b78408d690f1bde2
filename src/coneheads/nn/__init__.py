"""Layers: ``ConeAttention``, the operator with learned parameters, and ``ConeMultiheadAttention`` round it."""

from coneheads.nn.cone_attention import ConeAttention
from coneheads.nn.key_value_cache import KeyValueCache
from coneheads.nn.multihead_attention import ConeMultiheadAttention

__all__ = ["ConeAttention", "ConeMultiheadAttention", "KeyValueCache"]
