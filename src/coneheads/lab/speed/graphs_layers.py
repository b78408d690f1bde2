"""What is timed on graphs: layers with the same parameters, and epochs of the same network.

A layer of ours has the projections of its counterpart in torch_geometric, under the same names: TransformerConv without
its skip connection has three with a bias, GATConv has one without, two attention vectors and a bias at the end. Between
them stands ``edge_attention`` on edges that were sorted once, before. No layer of torch_geometric adds self-loops by
itself, which would cost it time at every call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, elu
from torch_geometric import EdgeIndex  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch_geometric.nn import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    GATConv,
    GATv2Conv,
    TransformerConv,
)

from coneheads.backends import cpp
from coneheads.backends.sorted_edges import SortedEdges
from coneheads.functional import edge_attention
from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import Failed
from coneheads.lab.models.gat import GAT, SparseFeatures
from coneheads.lab.speed.graphs import CORA_NODES, COUNTERPARTS, EPOCH, OURS, OURS_DENSE, GraphRun

# How many nodes of Cora have so many neighbours.
CORA_DEGREES = {
    1: 485, 2: 583, 3: 553, 4: 389, 5: 281, 6: 131, 7: 82, 8: 57, 9: 25, 10: 26, 11: 14, 12: 18, 13: 5, 14: 6, 15: 6,
    16: 7, 17: 8, 18: 3, 19: 5, 21: 3, 22: 1, 23: 3, 26: 1, 29: 1, 30: 2, 31: 1, 32: 2, 33: 1, 34: 1, 36: 1, 40: 1,
    42: 1, 44: 1, 65: 1, 74: 1, 78: 1, 168: 1,
}  # fmt: skip
CORA_NONZERO = 0.0127
CLASSES, LABELLED, DROPOUT = 7, 140, 0.6


def edge_index_of(run: GraphRun) -> Tensor:
    """int64 [2, edges]: of a random graph, or of one with the degrees of Cora and a self-loop at each node."""
    generator = torch.Generator().manual_seed(0)
    if run.graph != "cora":
        return torch.randint(run.nodes, (2, run.edges), generator=generator)
    degrees = torch.tensor([degree for degree, count in CORA_DEGREES.items() for _ in range(count)])
    ends = torch.arange(CORA_NODES).repeat_interleave(degrees)
    pairs = ends[torch.randperm(len(ends), generator=generator)].view(2, -1)
    nodes = torch.randperm(CORA_NODES, generator=generator)  # the degrees above come in order
    return nodes[torch.cat([pairs, pairs.flip(0), torch.arange(CORA_NODES).expand(2, -1)], 1)]


def features_of(run: GraphRun) -> Tensor:
    """[nodes, features]: normal; of Cora, few words in each document, with the sum 1."""
    generator = torch.Generator().manual_seed(1)
    if run.graph != "cora":
        return torch.randn(run.nodes, run.features, generator=generator)
    words = (torch.rand(run.nodes, run.features, generator=generator) < CORA_NONZERO).float()
    return words / words.sum(1, keepdim=True).clamp_min(1)


class Problem:
    """A graph with its features, in the forms that the candidates take: made once, outside of what is timed."""

    def __init__(self, run: GraphRun) -> None:
        self.x = features_of(run)
        self.edge_index = edge_index_of(run)
        self._nodes = run.nodes
        self._forms: dict[str, Any] = {"pyg": self.edge_index}

    def edges_for(self, candidate: str) -> Any:
        """Sorted by target and by source for ours; for "pyg_sorted" an EdgeIndex, sorted by target, caches filled."""
        form = {OURS_DENSE: OURS, "pyg_sparse": "pyg"}.get(candidate, candidate)
        if form not in self._forms:
            if form == OURS:
                self._forms[form] = SortedEdges.of(self.edge_index, self._nodes)
            else:
                edges = EdgeIndex(self.edge_index, sparse_size=(self._nodes, self._nodes))
                self._forms[form] = edges.sort_by("col").values.fill_cache_()
        return self._forms[form]


class QueryKeyValue(nn.Module):
    """TransformerConv with another score: x [N, features] -> [N, heads * size]."""

    def __init__(self, features: int, heads: int, size: int, score: str) -> None:
        super().__init__()
        self.heads, self.size, self.score = heads, size, score
        self.lin_key, self.lin_query, self.lin_value = (nn.Linear(features, heads * size) for _ in range(3))

    def forward(self, x: Tensor, edges: SortedEdges, backend: str = "auto") -> Tensor:
        query, key, value = (
            linear(x).view(-1, self.heads, self.size) for linear in (self.lin_query, self.lin_key, self.lin_value)
        )
        return cast(Tensor, edge_attention(query, key, value, edges, score=self.score, backend=backend)).flatten(1)


class Concatenation(nn.Module):
    """GATConv: x [N, features] -> [N, heads * size]."""

    def __init__(self, features: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.lin = nn.Linear(features, heads * size, bias=False)
        self.att_src, self.att_dst = (nn.Parameter(torch.empty(1, heads, size)) for _ in range(2))
        for vector in (self.att_src, self.att_dst):
            nn.init.xavier_uniform_(vector)
        self.bias = nn.Parameter(torch.zeros(heads * size))

    def forward(self, x: Tensor, edges: SortedEdges, backend: str = "auto") -> Tensor:
        value = self.lin(x).view(-1, self.heads, self.size)
        query, key = ((value * vector).sum(-1, keepdim=True) for vector in (self.att_dst, self.att_src))
        out = cast(Tensor, edge_attention(query, key, value, edges, score="concatenation", backend=backend))
        return out.flatten(1) + self.bias


def layer_of(run: GraphRun) -> nn.Module:
    """The layer of a run, its parameters those of its counterpart."""
    sizes = (run.features, run.heads, run.size)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2)
        if run.layer == "GATv2Conv":
            return cast(nn.Module, GATv2Conv(run.features, run.size, heads=run.heads, add_self_loops=False))
        score = next((ours for ours, theirs in COUNTERPARTS.items() if theirs == run.layer), run.layer)
        ours = Concatenation(*sizes) if score == "concatenation" else QueryKeyValue(*sizes, score)
        if run.layer not in COUNTERPARTS.values():
            return ours
        pyg = (
            GATConv(run.features, run.size, heads=run.heads, add_self_loops=False)
            if run.layer == "GATConv"
            else TransformerConv(run.features, run.size, heads=run.heads, root_weight=False)
        )
    # It holds a skip connection that it does not use.
    missing = pyg.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(name.startswith("lin_skip.") for name in missing.missing_keys)
    return cast(nn.Module, pyg)


def parameters_of(layer: nn.Module) -> list[nn.Parameter]:
    """Those that the result depends on."""
    return [value for name, value in layer.named_parameters() if not name.startswith("lin_skip.")]


class PygGAT(nn.Module):
    """The paper's network for Cora of torch_geometric's layers."""

    def __init__(self, features: int, heads: int, size: int) -> None:
        super().__init__()
        self.first = GATConv(features, size, heads=heads, dropout=DROPOUT, add_self_loops=False)
        self.last = GATConv(heads * size, CLASSES, heads=1, dropout=DROPOUT, add_self_loops=False)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """x may be sparse (CSR): dropout leaves a 0 a 0, and so concerns the others alone."""
        if x.layout == torch.sparse_csr:
            values = dropout(x.values(), DROPOUT, self.training)
            places = (x.crow_indices(), x.col_indices())
            x = torch.sparse_csr_tensor(*places, values, x.shape, check_invariants=False)
        else:
            x = dropout(x, DROPOUT, self.training)
        hidden = elu(self.first(x, edges))
        return cast(Tensor, self.last(dropout(hidden, DROPOUT, self.training), edges))


def network_of(run: GraphRun) -> nn.Module:
    """The network of an epoch; that of GATConv and that of the concatenation score have the same parameters."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        score = "concatenation" if run.layer == "GATConv" else run.layer
        options = ModelOptions(score=score, heads=run.heads, qk_dim=run.size, depth=2, dropout=DROPOUT)
        ours = GAT(options, run.features, CLASSES)
        if run.layer != "GATConv":
            return ours
        pyg = PygGAT(run.features, run.heads, run.size)
    with torch.no_grad():
        for layer, source in zip((pyg.first, pyg.last), cast(Any, ours.layers), strict=True):
            layer.lin.weight.copy_(source.weight.T)
            layer.att_src.copy_(source.att_source)
            layer.att_dst.copy_(source.att_target)
            layer.bias.copy_(source.bias)
    return pyg


def features_for(run: GraphRun, x: Tensor) -> Tensor | SparseFeatures:
    """The lab's network takes features of which most are 0 as such, and torch_geometric's can; others are dense."""
    if run.pass_ == EPOCH and run.candidate == OURS:
        return SparseFeatures.of(x)
    if run.candidate != "pyg_sparse":
        return x
    with warnings.catch_warnings():  # torch says once that its sparse matrices are young
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return x.to_sparse_csr()


def call_of(run: GraphRun, problem: Problem) -> Callable[[], object]:
    """What is timed: a function of no arguments that does the run once, all that is made beforehand left out."""
    # Without them ours would be the reference, ten times slower and larger, under the same name.
    if run.candidate in (OURS, OURS_DENSE) and (reason := cpp.unavailable()):
        raise Failed(f"graphs are measured on the kernels of the cpp backend, and {reason}")
    edges = problem.edges_for(run.candidate)
    if run.pass_ == EPOCH:
        return _epoch(network_of(run), features_for(run, problem.x), edges, run.nodes)
    layer = layer_of(run)
    if run.pass_ == "forward":

        def forward() -> object:
            with torch.no_grad():
                return layer(problem.x, edges)

        return forward
    wanted, x = wanted_of(run, layer, problem.x)
    gradient = upstream_gradient(run)
    return lambda: torch.autograd.grad(layer(x, edges), wanted, gradient)


def wanted_of(run: GraphRun, layer: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """What a backward pass computes gradients of, and the input: of Cora it is data, else it comes from a layer."""
    wanted: list[Tensor] = list(parameters_of(layer))
    if run.graph == "cora":
        return wanted, x
    x = x.detach().requires_grad_()
    return [*wanted, x], x


def upstream_gradient(run: GraphRun) -> Tensor:
    """The fixed gradient [nodes, heads * size] that a backward pass starts from."""
    return torch.randn(run.nodes, run.heads * run.size, generator=torch.Generator().manual_seed(4))


def _epoch(network: nn.Module, x: Tensor | SparseFeatures, edges: Any, nodes: int) -> Callable[[], object]:
    """One step of Adam on the labelled nodes, then the logits of all nodes without dropout."""
    generator = torch.Generator().manual_seed(5)
    labelled = torch.randperm(nodes, generator=generator)[:LABELLED]
    labels = torch.randint(CLASSES, (len(labelled),), generator=generator)
    adam = torch.optim.Adam(network.parameters(), lr=0.005, weight_decay=5e-4)

    def epoch() -> object:
        network.train()
        adam.zero_grad()
        cross_entropy(network(x, edges)[labelled], labels).backward()
        adam.step()
        network.eval()
        with torch.no_grad():
            return network(x, edges)

    return epoch
