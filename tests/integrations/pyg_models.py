"""Small models of torch_geometric, by their name; each takes the features and the edges of ``graph()``."""

import torch
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.nn.attention import PerformerAttention, SGFormerAttention
from torch_geometric.nn.models.attentive_fp import GATEConv

NODES, CHANNELS = 8, 12
HEADS, SIZE = 2, 6


def layer(kind, *sizes, **settings):
    """A layer of this class for the features of ``graph()``, where nothing else is said."""
    return kind(*(sizes or (CHANNELS, SIZE)), **{"heads": HEADS} | settings)


def graph():
    """Features [8, 12] and 24 different edges, no self-loop among them; node 7 has no edge."""
    pairs = torch.cartesian_prod(torch.arange(NODES - 1), torch.arange(NODES - 1))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return torch.randn(NODES, CHANNELS), pairs[torch.randperm(len(pairs))[:24]].T.contiguous()


class Stack(nn.Module):
    """Layers of a graph with ELU between them."""

    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = nn.functional.elu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


class OneGraph(nn.Module):
    """A model that also wants to know the graph of each node."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, edge_index):
        return self.net(x, edge_index, edge_index.new_zeros(x.shape[0]))


class Molecule(nn.Module):
    """``AttentiveFP`` on one molecule without features of bonds: GATConv within it and, bipartite, in its readout."""

    def __init__(self):
        super().__init__()
        self.net = pyg.AttentiveFP(CHANNELS, 8, 3, edge_dim=1, num_layers=2, num_timesteps=2)

    def forward(self, x, edge_index):
        bonds, batch = x.new_ones(edge_index.shape[1], 1), edge_index.new_zeros(x.shape[0])
        return self.net(x, edge_index, bonds, batch)


def two(kind, **settings):
    return lambda: Stack(kind(CHANNELS, 6, heads=2, **settings), kind(CHANNELS, 4, **settings))


def one(kind, *sizes, **settings):
    return lambda: Stack(kind(*sizes, **settings))


#: models that convert takes; what else attends in them stays as it is
MODELS = {
    "AttentiveFP": Molecule,
    "GAT": lambda: pyg.GAT(CHANNELS, 8, num_layers=2, out_channels=4, heads=2),
    "GATConv": two(pyg.GATConv),
    "Polynormer": lambda: OneGraph(pyg.Polynormer(CHANNELS, 8, 4, local_layers=2, local_attn=True, heads=2)),
    "TransformerConv": two(pyg.TransformerConv),
}
#: models that convert refuses, as none of their attention has a score of two points on edges
REFUSED = {
    "AGNNConv": one(pyg.AGNNConv),
    "DNAConv": one(pyg.DNAConv, CHANNELS, heads=2),
    "DenseGATConv": one(pyg.DenseGATConv, CHANNELS, 4),
    "GATEConv": one(GATEConv, CHANNELS, 4, 1),
    "GATv2Conv": two(pyg.GATv2Conv),
    "GeneralConv": one(pyg.GeneralConv, CHANNELS, 4, attention=True),
    "HANConv": one(pyg.HANConv, CHANNELS, 4, (["a"], [("a", "to", "a")]), heads=2),
    "HEATConv": one(pyg.HEATConv, CHANNELS, 4, 2, 2, 2, 1, 2),
    "HGTConv": one(pyg.HGTConv, CHANNELS, 4, (["a"], [("a", "to", "a")])),
    "HypergraphConv": one(pyg.HypergraphConv, CHANNELS, 4, use_attention=True),
    "PerformerAttention": one(PerformerAttention, CHANNELS, heads=2),
    "PointTransformerConv": one(pyg.PointTransformerConv, CHANNELS, 4),
    "RGATConv": one(pyg.RGATConv, CHANNELS, 4, num_relations=2),
    "SGFormerAttention": one(SGFormerAttention, CHANNELS),
    "SuperGATConv": two(pyg.SuperGATConv),
}
