"""The score on the edges of a graph: one number an edge and head, where ``attention_scores`` has all pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads import _checks
from coneheads.backends import edges
from coneheads.backends.inputs import compute_dtype, without_autocast
from coneheads.nn.cone_attention import ConeAttention
from coneheads.scores import Score


def edge_scores(score: Score, query: Tensor, key: Tensor, edge_index: Tensor) -> Tensor:
    """The score of the target's query and the source's key for every edge, before the softmax over a target's edges.

    Every node becomes a point once, however many edges it has, and distances come from differences of the points: what
    one pair gives, ``attention_scores`` gives in its place. Memory is that of [M, H, E].

    Args:
        score: its fields are numbers, or tensors of shape [] or [H].
        query: [N_target, H, E], E >= 2.
        key: [N_source, H, E], of the same dtype, on the same device.
        edge_index: integers [2, M], the sources and the targets; an edge that stands twice counts twice.

    Returns:
        [M, H] in float32, in float64 for float64 inputs: half precision is not rounded before the softmax.

    Example:
        >>> from coneheads.scores import Umbral
        >>> query, key = torch.randn(2, 5, 3, 8).unbind(0)             # 5 nodes, 3 heads, 8 features
        >>> edge_index = torch.tensor([[0, 1, 4], [2, 2, 3]])          # 0 -> 2, 1 -> 2, 4 -> 3
        >>> edge_scores(Umbral(), query, key, edge_index).shape
        torch.Size([3, 3])
    """
    _check(query, key, edge_index)
    source, target = edge_index
    _within("query", query, "target", target)
    _within("key", key, "source", source)
    with without_autocast(query.device.type):
        tensors = {
            name: _checks.per_head(name, value, query, (query.shape[1],)).to(compute_dtype(query.dtype))[None]
            for name, value in score.parameters().items()
            if isinstance(value, Tensor)
        }
        score = score.for_size(query.shape[-1]).with_parameters(tensors)
        return edges.edge_scores(score, query, key, source, target)


class EdgeAttention(ConeAttention):
    """``ConeAttention`` for the edges of a graph: it gives their scores, and the graph's layer does the rest.

    Arguments as in ``ConeAttention``.

    Example:
        >>> cone = EdgeAttention("penumbral", heads=3, size=8, learn_gamma=True)
        >>> query, key = torch.randn(2, 5, 3, 8).unbind(0)
        >>> cone(query, key, torch.tensor([[0, 1, 4], [2, 2, 3]])).shape
        torch.Size([3, 3])
    """

    def forward(self, query: Tensor, key: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        """[N_target, H, E], [N_source, H, E] and [2, M] -> the scores [M, H], see ``edge_scores``."""
        return edge_scores(self.score(), query, key, edge_index)


def _within(argument: str, nodes: Tensor, side: str, index: Tensor) -> None:
    """An error for an edge to a node that does not exist; not while a graph is compiled, which looks at no values."""
    if torch.compiler.is_compiling() or index.numel() == 0 or index.device.type == "meta":
        return
    low, high = (int(bound) for bound in index.aminmax())
    if low < 0 or high >= len(nodes):
        raise IndexError(
            f"edge_index has a {side} outside 0..{len(nodes) - 1}, the nodes of {argument}; "
            f"they reach from {low} to {high}"
        )


def _check(query: object, key: object, edge_index: object) -> None:
    for argument, value in (("query", query), ("key", key)):
        if not isinstance(value, Tensor) or value.dim() != 3:
            raise ValueError(f"{argument} must be a tensor [nodes, heads, size]; got {_checks.describe(value)}")
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    _checks.query_and_key(query.transpose(0, 1), key.transpose(0, 1), enable_gqa=False)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query and key must have the same number of heads (their second size); "
            f"got query {_checks.describe(query)} and key {_checks.describe(key)}"
        )
    whole = isinstance(edge_index, Tensor) and edge_index.dtype in (torch.int64, torch.int32)
    if not isinstance(edge_index, Tensor) or not whole or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index must be an int64 or int32 tensor [2, edges], the sources and the targets; "
            f"got {_checks.describe(edge_index)}"
        )
