"""The edges of a graph in the two orders that attention on them reads: by target and by source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coneheads import _checks


@dataclass(frozen=True)
class SortedEdges:
    """A graph for repeated use: ``edge_attention`` takes it in the place of ``edge_index``, and need not sort again.

    Make it with ``SortedEdges.of``. ``by_target`` is (start [targets + 1], source [M], edge [M]): the edges into node i
    are those from start[i] to start[i + 1], each with its source and its number in edge_index. ``by_source`` is
    (start [sources + 1], target [M], place [M]), with the place of the edge in the order by target.

    >>> edges = SortedEdges.of(torch.tensor([[0, 2, 1], [1, 0, 1]]), 3)
    >>> edges.by_target[0].tolist(), edges.by_target[1].tolist()     # into node 0: from 2; into node 1: from 0, 1
    ([0, 1, 3, 3], [2, 0, 1])
    """

    edge_index: Tensor  # int64 [2, M]
    sources: int
    targets: int
    by_target: tuple[Tensor, Tensor, Tensor]
    by_source: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def of(edge_index: Tensor, sources: int, targets: int | None = None) -> SortedEdges:
        """The edges (source, target) [2, M] of a graph of so many nodes, ``targets`` if those are of another kind."""
        targets = sources if targets is None else targets
        _checks.edges(edge_index, sources, targets)
        # A subclass of Tensor, such as PyG's EdgeIndex, would take part in what follows.
        edge_index = edge_index.as_subclass(Tensor).detach().long()
        source, target = edge_index.unbind(0)
        by_target = torch.argsort(target, stable=True)
        place = torch.empty_like(by_target).scatter_(0, by_target, torch.arange(len(target), device=target.device))
        by_source = torch.argsort(source, stable=True)
        return SortedEdges(
            edge_index,
            sources,
            targets,
            (_starts(target, targets), source[by_target].int(), by_target.int()),
            (_starts(source, sources), target[by_source].int(), place[by_source].int()),
        )

    def to(self, device: torch.device | str) -> SortedEdges:
        """The same on another device."""
        by_target = tuple(tensor.to(device) for tensor in self.by_target)
        by_source = tuple(tensor.to(device) for tensor in self.by_source)
        return SortedEdges(self.edge_index.to(device), self.sources, self.targets, by_target, by_source)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.edge_index.shape[1]


def _starts(nodes: Tensor, count: int) -> Tensor:
    """Where the edges of each node begin, and where the last ones end, [count + 1]."""
    degree = torch.zeros(count + 1, dtype=torch.int64, device=nodes.device)
    degree.scatter_add_(0, nodes + 1, torch.ones_like(nodes))
    return degree.cumsum(0)
