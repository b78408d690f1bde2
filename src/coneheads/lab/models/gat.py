"""Graph attention networks with a score that can be chosen, as the paper has them for Cora and PPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, embedding_bag, pad

from coneheads.backends.sorted_edges import SortedEdges
from coneheads.functional import edge_attention
from coneheads.lab.commands import ModelOptions
from coneheads.lab.models.attention import scored
from coneheads.lab.models.start import resolve
from coneheads.scores import Concatenation


class _SparseProduct(torch.autograd.Function):
    """values @ weight. Backward is the same product with the transpose: that of torch sorts the columns every time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, features: SparseFeatures) -> Tensor:
        ctx.save_for_backward(values)
        ctx.features = features
        return _rows_times(features.rows, values, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        return _rows_times(ctx.features.transposed, values[ctx.features.order], grad.contiguous()), None, None


@dataclass(frozen=True)
class _Rows:
    """Where the numbers of a sparse matrix are: those of row i are ``start[i]:start[i + 1]``, in these columns."""

    start: Tensor
    columns: Tensor

    @staticmethod
    def of(rows: Tensor, columns: Tensor, count: int) -> _Rows:
        counts = torch.bincount(rows, minlength=count)
        return _Rows(counts.cumsum(0) - counts, columns)


def _rows_times(rows: _Rows, values: Tensor, matrix: Tensor) -> Tensor:
    return embedding_bag(rows.columns, matrix, rows.start, mode="sum", per_sample_weights=values)


@dataclass(frozen=True)
class SparseFeatures:
    """Features of nodes [N, F], most of them 0: the others, row by row; and the ``order`` that is column by column."""

    values: Tensor
    rows: _Rows
    transposed: _Rows
    order: Tensor

    @staticmethod
    def of(dense: Tensor) -> SparseFeatures:
        nodes, columns = dense.nonzero(as_tuple=True)
        order = columns.argsort(stable=True)
        transposed = _Rows.of(columns, nodes[order], dense.shape[1])
        return SparseFeatures(dense[nodes, columns], _Rows.of(nodes, columns, len(dense)), transposed, order)

    def times(self, weight: Tensor, dropped: float, training: bool) -> Tensor:
        """The product with a matrix; with dropout, which leaves a 0 a 0, and so concerns the others alone."""
        values = dropout(self.values, dropped, training)
        return cast(Tensor, _SparseProduct.apply(weight, values, self))


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """That of torch, which takes four times as long to draw."""
    if not training or p == 0:
        return x
    return x * (torch.rand_like(x) >= p).to(x.dtype).div_(1 - p) if p < 1 else x * 0


@dataclass(frozen=True)
class Graph:
    """The features of N nodes [N, F], and the edges with a self-loop at each node."""

    x: Tensor | SparseFeatures
    edges: SortedEdges
    features: int


class GraphAttention(nn.Module):
    """One layer: nodes [N, F] -> [N, heads * size], or the mean over the heads [N, size].

    The score of an edge is that of the projected features of its two ends, which are also the values. ``concatenation``
    is GAT's own: ``LeakyReLU(a_target . W x_target + a_source . W x_source)``.
    """

    def __init__(
        self, options: ModelOptions, inputs: int, heads: int, size: int, *, averaged: bool = False, skip: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.size, self.averaged, self.dropped = heads, size, averaged, options.dropout
        self.weight = nn.Parameter(torch.empty(inputs, heads * size))
        self.bias = nn.Parameter(torch.zeros(size if averaged else heads * size))
        nn.init.xavier_uniform_(self.weight)
        concatenation = options.score == Concatenation.name
        self.cone = None if concatenation else scored(options.score, heads, size, resolve(options))
        self.att_source = self.att_target = None
        if concatenation:
            self.att_source, self.att_target = (nn.Parameter(torch.empty(heads, size)) for _ in range(2))
            for vector in (self.att_source, self.att_target):
                nn.init.xavier_uniform_(vector)
        self.skip = nn.Linear(inputs, heads * size, bias=False) if skip else None
        if self.skip is not None:
            nn.init.xavier_uniform_(self.skip.weight)

    def forward(self, x: Tensor | SparseFeatures, edges: SortedEdges) -> Tensor:
        if isinstance(x, SparseFeatures):
            projected = x.times(self.weight, self.dropped, self.training)
        else:
            x = dropout(x, self.dropped, self.training)
            projected = x @ self.weight
        value = projected.view(-1, self.heads, self.size)
        dropped = self.dropped if self.training else 0.0
        query, key, score = value, value, Concatenation() if self.cone is None else self.cone.score()
        if self.att_target is not None and self.att_source is not None:
            query, key = ((value * a).sum(-1, keepdim=True) for a in (self.att_target, self.att_source))
        out = cast(Tensor, edge_attention(query, key, value, edges, score=score, dropout_p=dropped))
        if self.skip is not None:
            out = out + self.skip(x).view_as(out)
        return (out.mean(1) if self.averaged else out.flatten(1)) + self.bias


class GAT(nn.Module):
    """Layers with ELU between them; the last one, of ``last_heads``, gives logits [N, classes].

    With one last head it is that of Cora, with several they are averaged, and with ``skip`` each layer has a linear
    way past it: so it is that of PPI.
    """

    def __init__(
        self, options: ModelOptions, features: int, classes: int, *, last_heads: int = 1, skip: bool = False
    ) -> None:
        super().__init__()
        layers, width = [], features
        for _ in range(options.depth - 1):
            layers.append(GraphAttention(options, width, options.heads, options.qk_dim, skip=skip))
            width = options.heads * options.qk_dim
        layers.append(GraphAttention(options, width, last_heads, classes, averaged=last_heads > 1, skip=skip))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor | SparseFeatures, edges: SortedEdges) -> Tensor:
        """Nodes [N, F] -> logits [N, classes]."""
        for layer in self.layers[:-1]:
            x = elu(layer(x, edges))
        return cast(Tensor, self.layers[-1](x, edges))


class OneGraph(nn.Module):
    """A GAT for the nodes of a graph that never changes: it is asked for nodes by their numbers."""

    def __init__(self, net: GAT, graph: Graph) -> None:
        super().__init__()
        self.net, self.graph = net, graph

    def forward(self, nodes: Tensor) -> Tensor:
        """nodes [B] -> logits [B, classes]. All nodes are computed: what a node is depends on its neighbours."""
        return self.net(self.graph.x, self.graph.edges)[nodes]


class ManyGraphs(nn.Module):
    """A GAT for graphs that are asked for by their numbers, all logits padded to the largest graph there is."""

    def __init__(self, net: GAT, graphs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.net, self.graphs = net, graphs
        self.largest = max(len(x) for x, _ in graphs)

    def forward(self, graphs: Tensor) -> Tensor:
        """graphs [B] -> logits [B, nodes, classes]."""
        chosen = [self.graphs[number] for number in graphs.tolist()]
        sizes = [len(x) for x, _ in chosen]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        index = torch.cat([edges + start for (_, edges), start in zip(chosen, starts, strict=True)], 1)
        logits = self.net(torch.cat([x for x, _ in chosen]), SortedEdges.of(index, sum(sizes)))
        return torch.stack([pad(part, (0, 0, 0, self.largest - len(part))) for part in logits.split(sizes)])
