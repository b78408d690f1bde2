"""``GATConv`` and ``TransformerConv`` of torch_geometric with the score on edges.

Both take what their base takes, in all its forms (edge_index, ``EdgeIndex``, sparse matrices, bipartite pairs, edge
features), and differ in the score alone: ``cone`` gives the scores of the edges, PyG does the softmax and the sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch_geometric.nn import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    GATConv,
    MessagePassing,
    TransformerConv,
)
from torch_geometric.typing import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    OptTensor,
    PairTensor,
    SparseTensor,
    torch_sparse,
)
from torch_geometric.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    add_self_loops,
    is_torch_sparse_tensor,
    remove_self_loops,
    softmax,
)
from torch_geometric.utils.sparse import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    set_sparse_value,
)

from coneheads.integrations.layers import Settings
from coneheads.nn.edge_scores import EdgeAttention
from coneheads.scores import Score


class OnEdges:
    """What both share, beside a class of PyG's: the scores of edges by ``self.cone``."""

    # PyG replaces it by code made for a class, and finds the original, which `explain` needs, by inheritance: there it
    # would meet the code made for the base.
    propagate = MessagePassing.propagate

    def __init__(
        self: Any,
        *args: Any,
        score: Score | str = "penumbral",
        learn_gamma: bool = False,
        learn_radius: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.cone = edge_cone(self, Settings(score, learn_gamma, learn_radius))

    def by_head(self: Any, features: Tensor) -> Tensor:
        """[N, H * E] -> [N, H, E]."""
        return features.view(-1, self.heads, self.out_channels)

    def weights(self: Any, scores: Tensor, like: Tensor, *groups: Any) -> Tensor:
        """The softmax of the scores [M, H] over the edges of each target, in the dtype of ``like``."""
        return softmax(scores, *groups).to(like.dtype)


class ConeTransformerConv(OnEdges, TransformerConv):  # type: ignore[misc,unused-ignore]
    """``TransformerConv`` with another score of queries and keys; edge features are added to keys and values as there.

    Args:
        score, learn_gamma, learn_radius: those of ``ConeAttention``. ``score="dot"`` is ``TransformerConv`` itself.
        args, kwargs: those of ``TransformerConv``; out_channels, the features of a head, at least 2.

    Example:
        >>> conv = ConeTransformerConv(16, 8, heads=2, score="umbral")
        >>> conv(torch.randn(4, 16), torch.tensor([[0, 1, 2], [3, 3, 0]])).shape
        torch.Size([4, 16])
    """

    def message(
        self,
        query: Tensor,
        query_i: Tensor,
        key: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        edge_index_j: Tensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int | None,
    ) -> Tensor:
        """Nodes [N, H, E] and the ends of M edges -> the weighted values [M, H, E]; PyG calls it by these names.

        From ``query_i`` PyG takes the number of targets, and the check of their indices; it has no other use.
        """
        source = edge_index_j
        if self.lin_edge is not None:
            if edge_attr is None:
                raise ValueError(f"edge_attr must be given to a layer with edge_dim={self.edge_dim}")
            edge_attr = self.by_head(self.lin_edge(edge_attr))
            key = key.index_select(0, source) + edge_attr  # each edge has a key of its own
            source = torch.arange(key.shape[0], device=key.device, dtype=index.dtype)
        self._alpha = self.weights(self.cone(query, key, torch.stack((source, index))), value_j, index, ptr, size_i)
        values = value_j if edge_attr is None else value_j + edge_attr
        return values * dropout(self._alpha, self.dropout, self.training)[..., None]


class ConeGATConv(OnEdges, GATConv):  # type: ignore[misc,unused-ignore]
    """``GATConv`` with another score: query and key are the projected features of target and source, as in the paper.

    It replaces all of GAT's own score, ``LeakyReLU(a_target . W x_target + a_source . W x_source)``: there is no
    att_src, no att_dst (a checkpoint of ``GATConv`` has these two more) and no negative_slope. With edge_dim,
    ``a_edge . W_edge x_edge`` is added to the score.

    Args:
        score, learn_gamma, learn_radius: those of ``ConeAttention``.
        args, kwargs: those of ``GATConv``; out_channels, the features of a head, at least 2. No negative_slope.

    Example:
        >>> conv = ConeGATConv(16, 8, heads=2, learn_gamma=True)
        >>> conv(torch.randn(4, 16), torch.tensor([[0, 1, 2], [3, 3, 0]])).shape
        torch.Size([4, 16])
    """

    edge_updater_type = {"x": PairTensor, "edge_attr": OptTensor}  # noqa: RUF012 - PyG wants a dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.negative_slope != 0.2:
            raise ValueError(f"negative_slope={self.negative_slope} has no use, leave it out: a cone has no LeakyReLU")
        self.att_src = self.att_dst = None

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Arguments and results of ``GATConv.forward``, but (x, None) is an error: a score needs both ends."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        if source is None or target is None or source.dim() != 2 or target.dim() != 2:
            shapes = [None if end is None else list(end.shape) for end in (source, target)]
            raise ValueError(f"x must be [nodes, channels], of source and of target; got {shapes[0]} and {shapes[1]}")
        of_source, of_target = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        keys = self.by_head(of_source(source))
        queries = keys if source is target and of_source is of_target else self.by_head(of_target(target))
        if self.add_self_loops:
            nodes = min(len(keys), len(queries)) if size is None else min(size)
            edge_index, edge_attr = self._with_self_loops(edge_index, edge_attr, nodes)
        weights = self.edge_updater(edge_index, x=(keys, queries), edge_attr=edge_attr, size=size)  # [M, H]
        out = self.propagate(edge_index, x=(keys, queries), alpha=weights, size=size)  # [N, H, E]
        out = out.flatten(1) if self.concat else out.mean(1)
        out = out if self.res is None else out + self.res(target)
        out = out if self.bias is None else out + self.bias
        if not return_attention_weights:
            return out
        if isinstance(edge_index, SparseTensor):
            return out, edge_index.set_value(weights, layout="coo")
        sparse = is_torch_sparse_tensor(edge_index)
        return out, (set_sparse_value(edge_index, weights) if sparse else edge_index, weights)

    def _with_self_loops(self, edge_index: Any, edge_attr: Tensor | None, nodes: int) -> tuple[Any, Tensor | None]:
        if isinstance(edge_index, Tensor):
            others = remove_self_loops(edge_index, edge_attr)
            return add_self_loops(*others, fill_value=self.fill_value, num_nodes=nodes)
        if self.edge_dim is not None:
            raise NotImplementedError("add_self_loops=True with edge_dim takes edge_index as a tensor, no SparseTensor")
        return torch_sparse.set_diag(edge_index), edge_attr

    def edge_update(
        self, x: PairTensor, edge_attr: OptTensor, edge_index_j: Tensor, index: Tensor, ptr: OptTensor
    ) -> Tensor:
        """Nodes [N, H, E] and the ends of M edges -> the weights [M, H]; PyG calls it by these names."""
        key, query = x  # whatever the flow: PyG takes x_j of the first and x_i of the second
        scores = self.cone(query, key, torch.stack((edge_index_j, index)))
        if edge_attr is not None:
            if self.lin_edge is None:
                raise ValueError("edge_attr was given to a layer without edge_dim, which has no weights for it")
            features = self.lin_edge(edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr)
            scores = scores + (self.by_head(features) * self.att_edge).sum(-1)
        return dropout(self.weights(scores, key, index, ptr, len(query)), self.dropout, self.training)


def edge_cone(conv: Any, settings: Settings) -> EdgeAttention:
    """The scores of a layer, on its device and in its dtype."""
    if conv.out_channels < 2:
        raise ValueError(f"out_channels must be at least 2, a position and a height; got {conv.out_channels}")
    like = next(conv.parameters())
    learn = {"learn_gamma": settings.learn_gamma, "learn_radius": settings.learn_radius}
    cone = EdgeAttention(settings.score, conv.heads, conv.out_channels, **learn, device=like.device, dtype=like.dtype)
    return cone.train(conv.training)
