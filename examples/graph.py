"""GAT with its own score and with cones, on a tree with wrong edges: `python examples/graph.py`.

It needs torch-geometric. Each node has to name the branch of the tree that it belongs to, from features with much
noise, its own and those of its neighbours. This shows the one line that a model of yours needs, and that it trains; a
small made-up graph with a few seeds says little about which score is better.
"""

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GAT
from torch_geometric.utils import to_undirected

from coneheads.integrations.conversion import convert

CHILDREN, DEPTH, CHANNELS, SEEDS, STEPS = 3, 5, 16, 3, 40


def noisy_tree() -> Data:
    """A tree of 364 nodes and as many random edges; the classes are the 9 branches at depth 2."""
    parent, level, branch, features = [0], [0], [0], [torch.zeros(CHANNELS)]
    for node in range(1, sum(CHILDREN**depth for depth in range(DEPTH + 1))):
        above = (node - 1) // CHILDREN
        parent.append(above)
        level.append(level[above] + 1)
        branch.append(node - 1 - CHILDREN if level[node] == 2 else branch[above])
        features.append(features[above] + torch.randn(CHANNELS) / level[node])  # a family stays together
    nodes = torch.arange(len(parent))
    edges = torch.cat([torch.stack([torch.tensor(parent), nodes]), torch.randint(len(nodes), (2, len(nodes)))], 1)
    x = torch.stack(features) + 1.5 * torch.randn(len(nodes), CHANNELS)
    below = nodes[torch.tensor(level) >= 2]
    order = below[torch.randperm(len(below))]
    return Data(x, to_undirected(edges), y=torch.tensor(branch), train=order[:90], test=order[90:])


def accuracy(score: str | None, graph: Data) -> float:
    """Trains a GAT with this score or its own on a quarter of the nodes; the share of the others that it gets right."""
    model = GAT(CHANNELS, 32, num_layers=2, out_channels=CHILDREN**2, heads=4, dropout=0.3)
    if score is not None:
        convert(model, score, learn_gamma=True, probe=(graph.x, graph.edge_index))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(graph.x, graph.edge_index)[graph.train], graph.y[graph.train]).backward()
        optimizer.step()
    answers = model.eval()(graph.x, graph.edge_index).argmax(-1)
    return (answers == graph.y)[graph.test].float().mean().item()


for score in (None, "penumbral", "umbral"):
    found = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        found.append(accuracy(score, noisy_tree()))
    mean, spread = torch.tensor(found).mean(), torch.tensor(found).std()
    print(f"{score or 'GAT':10} {100 * mean:5.1f} % of the nodes, +- {100 * spread:.1f} over {SEEDS} seeds")
