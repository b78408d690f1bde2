"""torch_geometric: ``ConeGATConv`` and ``ConeTransformerConv``, to build with or to have by ``convert``.

``convert`` makes the layers of exactly these two classes cones, in place, and says of PyG's other attention why not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GATConv, TransformerConv  # type: ignore[import-not-found,import-untyped,unused-ignore]

from coneheads.integrations.layers import CONE, Inputs, Layer, Settings
from coneheads.integrations.pyg_layers import ConeGATConv, ConeTransformerConv, OnEdges, edge_cone
from coneheads.nn import ConeAttention

__all__ = ["ConeGATConv", "ConeTransformerConv", "find", "inputs_for", "restore", "swap"]

CONES = {GATConv: ConeGATConv, TransformerConv: ConeTransformerConv}
#: where a converted layer keeps the parameters that it has no use for; no part of its state dict
KEPT = "_before_cone"
#: layers of PyG that attend in another way, and why they are not converted
REFUSED = {
    "AGNNConv": "its score is a cosine of unprojected features with one learned factor",
    "CuGraphGATConv": "its score is inside a fused kernel",
    "DNAConv": "it attends over the layers before it, not over edges",
    "DenseGATConv": "it takes a dense adjacency matrix; that is coneheads.attention with attn_mask=",
    "GATEConv": "its score is a learned function of both nodes and the edge, not of two points",
    "GATv2Conv": "its score is a learned function of the sum of both nodes, not of two points",
    "GeneralConv": "its score is one of messages, not of two points",
    "HANConv": "its scores depend on the types of edges",
    "HEATConv": "its scores depend on the types of nodes and edges",
    "HGTConv": "its scores depend on the types of nodes and edges",
    "HypergraphConv": "its score is one of a node and a hyperedge",
    "LPAttLayer": "its score is one of a pair of nodes and a third",
    "PerformerAttention": "it is linear attention and has no scores",
    "PointTransformerConv": "it has a weight for each channel, not for each head",
    "PolynormerAttention": "it is linear attention and has no scores",
    "RGATConv": "its scores depend on the types of edges",
    "SGFormerAttention": "it is linear attention and has no scores",
    "SuperGATConv": "its scores are also trained to predict edges",
}


def find(model: nn.Module, run: Callable[[], Any] | None) -> list[Layer]:
    """See ``layers.Library``."""
    return [layer for name, module in model.named_modules() if (layer := _layer(name, module)) is not None]


def swap(model: nn.Module, layers: Sequence[Layer], settings: Settings) -> dict[str, ConeAttention]:
    """See ``layers.Library``. GAT's att_src and att_dst would get no gradient, so they are no parameters meanwhile."""
    for conv in (layer.module for layer in layers):
        setattr(conv, CONE, edge_cone(conv, settings))
        setattr(conv, KEPT, {name: getattr(conv, name) for name in ("att_src", "att_dst") if hasattr(conv, name)})
        for name in getattr(conv, KEPT):
            setattr(conv, name, None)
        _become(conv, CONES[type(conv)])
    return {layer.name: getattr(layer.module, CONE) for layer in layers}


def restore(model: nn.Module, names: Collection[str] | None = None) -> list[str]:
    """See ``layers.Library``."""
    ours = {name: module for name, module in model.named_modules() if hasattr(module, KEPT)}
    ours = {name: module for name, module in ours.items() if names is None or name in names}
    for conv in ours.values():
        like = next(conv.parameters())
        for name, parameter in getattr(conv, KEPT).items():
            parameter.data = parameter.data.to(like.device, like.dtype)  # the model may have moved
            setattr(conv, name, parameter)
        delattr(conv, KEPT)
        delattr(conv, CONE)
        _become(conv, next(base for base, cone in CONES.items() if type(conv) is cone))
    return list(ours)


def inputs_for(model: nn.Module) -> Inputs | None:
    """See ``layers.Library``: None, since a graph is the user's to give, as ``probe=``."""
    return None


def _layer(name: str, module: Any) -> Layer | None:
    """The layer that this module is; None if it does not attend, or is of another library."""
    kind = type(module)
    if kind in CONES:
        why_not = "" if module.out_channels > 1 else "out_channels=1: a score needs at least 2 features a head"
        return Layer(name, module, module.heads, module.out_channels, why_not)
    if issubclass(kind, OnEdges):
        return Layer(name, module, why_not="it has cone attention already")
    if issubclass(kind, tuple(CONES)):
        return Layer(name, module, why_not="it is a subclass, which may have changed the score")
    of_pyg = kind.__module__.startswith("torch_geometric.")
    attends = all(getattr(module, switch, True) for switch in ("attention", "use_attention"))
    why_not = REFUSED.get(kind.__name__, "") if of_pyg and attends else ""
    return Layer(name, module, why_not=why_not) if why_not else None


def _become(conv: Any, kind: type[Any]) -> None:
    """Makes a layer one of another class. PyG calls by the signatures that a constructor has read: they change too."""
    with torch.device("meta"):
        like = kind(1, 2)
    for name in ("inspector", "fuse", "_user_args", "_fused_user_args", "_edge_user_args"):
        setattr(conv, name, getattr(like, name))
    conv.__class__ = kind
    if "propagate" in vars(conv):  # which PyG binds to the layer once its `explain` was set
        explain, conv._explain = conv._explain, None
        del conv.propagate
        conv.explain = explain
